// Asks all ranks to run what is to be planned, takes rank 0's times, and keeps those of operators for later jobs.
#include "smp/engine/planning/measure_costs.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>

#include "partitioner/graph/graph_io.h"
#include "runtime/device/device.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"
#include "runtime/gradients/gradient_reducer.h"
#include "smp/engine/planning/auto_layout.h"
#include "smp/engine/planning/cost_cache.h"
#include "smp/engine/planning/graphs_measurement.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {

using namespace partitioner;

namespace {

constexpr int64_t kBytesOfFloat = sizeof(float);
constexpr int64_t kMostAveragedBytes = int64_t{1} << 28;

// Elements of the gradients whose averaging is timed; none: nothing is ever averaged. Many small ones take longer than one,
// and what fits a cache takes less than what does not: so those of the model, but of a large one no more than half of what a
// rank will have, for each stands beside a parameter of its own.
std::vector<int64_t> gradients_to_average(const RankState& rank) {
  constexpr int64_t kLeastBytes = int64_t{1} << 20;
  const Context& context = rank.context;
  const int num_replicas = context.is_laid_out ? context.replicas->size() : context.world->size();
  if (num_replicas == 1) return {};
  std::vector<int64_t> elements;
  int64_t bytes = 0;
  for (const runtime::NamedTensor& named : rank.models.bindings().tensors()) {
    const bool is_trained = named.kind == ValueKind::kParameter && named.tensor.requires_grad() && named.tensor.numel() > 0;
    if (!is_trained) continue;
    elements.push_back(named.tensor.numel());
    bytes += elements.back() * kBytesOfFloat;
  }
  const int stages = context.is_laid_out ? context.pipeline->size() : 1;
  const int64_t most = std::clamp(bytes / stages / 2, kLeastBytes, kMostAveragedBytes);
  while (bytes > most && elements.size() > 1) {
    bytes -= elements.back() * kBytesOfFloat;
    elements.pop_back();
  }
  if (!elements.empty()) elements.front() = std::min(elements.front(), most / kBytesOfFloat);
  return elements;
}

// Averages gradients as replicas do, and tells what a MiB of them takes on two.
double averaging_us_per_mib(const Context& context, const std::vector<int64_t>& elements) {
  constexpr int kTimes = 5;
  runtime::Transport& world = *context.world;
  std::vector<at::Tensor> parameters;
  const auto options = at::TensorOptions(runtime::this_ranks_device().type).dtype(at::kFloat);
  for (const int64_t count : elements) parameters.push_back(at::zeros({count}, options).set_requires_grad(true));
  const int64_t bucket_bytes = context.config.bucket_cap_mb * (int64_t{1} << 20);
  runtime::GradientReducer reducer(parameters, world, {.bucket_bytes = bucket_bytes, .overlap = false});
  std::vector<double> us;
  for (int k = 0; k < kTimes; ++k) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::ones_like(parameter.detach());
    world.barrier();
    const int64_t begin_ns = runtime::this_ranks_device().now_ns();
    reducer.begin(world.size());
    reducer.finish();
    us.push_back(static_cast<double>(runtime::this_ranks_device().now_ns() - begin_ns) * 1e-3);
  }
  std::nth_element(us.begin(), us.begin() + kTimes / 2, us.end());
  const double share = reducer.shared_bytes() > 0 ? 1 : 2.0 * (world.size() - 1) / world.size();  // as averaging_us()
  const int64_t bytes = std::accumulate(elements.begin(), elements.end(), int64_t{0}) * kBytesOfFloat;
  return us[kTimes / 2] / (static_cast<double>(bytes) / (1 << 20)) / share;
}

void send_to_all(runtime::Transport& world, const std::string& bytes) {
  for (int r = 1; r < world.size(); ++r) world.send_bytes(r, runtime::kMeasureTag, bytes);
}

/// World rank 0.
class Measuring {
 public:
  explicit Measuring(RankState& rank)
      : rank_(rank), cache_(rank.context.config, rank.context.launch.local_size, rank.context.logger) {}

  /// What is not known yet of what this step may need.
  void run(const step_internal::Call& call) {
    MeasuredCosts costs = cache_.read();
    std::vector<GraphToPlan> unknown = wanted_graphs(call);
    std::erase_if(unknown, [&](const GraphToPlan& wanted) { return costs.covers(wanted.graph); });
    if (unknown.empty() && costs.size() > 0) {
      rank_.context.logger.info(c10::str("times of ", costs.size(), " operators are known from '", cache_.path(), "'"));
    }
    const double seconds = measure(unknown, costs);
    if (unknown.empty()) return;
    cache_.write(costs);
    const std::string kept = cache_.path().empty() ? "" : ", kept in '" + cache_.path() + "'";
    rank_.context.logger.info(c10::str("measured the operators of ", unknown.size(),
                                       unknown.size() == 1 ? " graph in " : " graphs in ", seconds, " s", kept));
  }

 private:
  // Adds to `costs` what may be kept, and tells all ranks the rest too. Returns the seconds that operators took.
  double measure(const std::vector<GraphToPlan>& graphs, MeasuredCosts& costs) {
    const int64_t begin_ns = runtime::this_ranks_device().now_ns();
    runtime::Transport& world = *rank_.context.world;
    const std::vector<int64_t> averaged = gradients_to_average(rank_);
    send_to_all(world, encode_wanted(graphs, averaged));
    const std::vector<GraphTimes> times = GraphsMeasurement(rank_, graphs).run();
    for (size_t g = 0; g < graphs.size(); ++g) costs.add(graphs[g].graph, times[g]);
    const double seconds = static_cast<double>(runtime::this_ranks_device().now_ns() - begin_ns) * 1e-9;
    MeasuredCosts of_job = costs;
    // Not kept: the next job may have another network.
    if (!averaged.empty()) of_job.set_averaging_us_per_mib(averaging_us_per_mib(rank_.context, averaged));
    const std::string text = of_job.to_json();
    send_to_all(world, text);
    rank_.programs.measured_costs().add_json(text);  // the same numbers as everywhere, to the last digit
    return seconds;
  }

  // The others wait for an answer, and the step itself refuses what is wrong with it.
  std::vector<GraphToPlan> wanted_graphs(const step_internal::Call& call) {
    try {
      return graphs_to_plan(rank_, call);
    } catch (...) {
      return {};
    }
  }

  RankState& rank_;
  CostCache cache_;
};

/// The ranks of the world but the first, which sends them what is wanted.
void measure_with_first(RankState& rank) {
  runtime::Transport& world = *rank.context.world;
  const Wanted wanted = decode_wanted(world.receive_bytes(0, runtime::kMeasureTag));
  GraphsMeasurement(rank, wanted.graphs).run();
  if (!wanted.averaged.empty()) averaging_us_per_mib(rank.context, wanted.averaged);
  rank.programs.measured_costs().add_json(world.receive_bytes(0, runtime::kMeasureTag));
}

}  // namespace

std::string encode_wanted(const std::vector<GraphToPlan>& graphs, const std::vector<int64_t>& averaged) {
  runtime::WireWriter out;
  out.put(averaged);
  out.put(static_cast<uint32_t>(graphs.size()));
  for (const auto& [graph, inputs] : graphs) out.put(serialise(graph));
  return out.take();
}

Wanted decode_wanted(std::string_view bytes) {
  return runtime::read_all(bytes, "what is to be measured", [](runtime::WireReader& in) {
    Wanted wanted;
    wanted.averaged.resize(in.get_count<uint32_t>(sizeof(int64_t)));
    int64_t left = kMostAveragedBytes / kBytesOfFloat;
    for (int64_t& elements : wanted.averaged) {
      elements = in.get_between<int64_t>(1, left);
      left -= elements;
    }
    wanted.graphs.resize(in.get_count<uint32_t>(sizeof(uint64_t)));
    for (GraphToPlan& one : wanted.graphs) one.graph = deserialise_graph(in.get_text());
    return wanted;
  });
}

void measure_costs(RankState& rank, int step_number, const step_internal::Call& call) {
  const Context& context = rank.context;
  if (context.config.cost != CostSource::kMeasured || context.join) return;
  const auto& models = rank.models.all();
  const bool is_planned =
      std::all_of(models.begin(), models.end(), [](const auto& model) { return model->is_partitioned(); });
  if (is_planned || !rank.measured_steps.insert(step_number).second) return;
  runtime::or_end_the_job(*context.world,
                          [&] { context.world->rank() == 0 ? Measuring(rank).run(call) : measure_with_first(rank); });
}

}  // namespace smp::engine
