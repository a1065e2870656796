// Graphs out, times back.
#include "smp/engine/planning/measure_costs.h"

#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "partitioner/graph/graph_io.h"
#include "runtime/gradients/gradient_reducer.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/planning/auto_layout.h"
#include "smp/engine/planning/cost_cache.h"
#include "smp/engine/planning/graphs_measurement.h"
#include "smp/engine/rank_state.h"
#include "smp/engine/step/split.h"

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
  for (const int64_t count : elements) parameters.push_back(at::zeros({count}, at::kFloat).set_requires_grad(true));
  const int64_t bucket_bytes = context.config.bucket_cap_mb * (int64_t{1} << 20);
  runtime::GradientReducer reducer(parameters, world, {.bucket_bytes = bucket_bytes, .overlap = false});
  std::vector<double> us;
  for (int k = 0; k < kTimes; ++k) {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::ones_like(parameter.detach());
    world.barrier();
    const auto begin = std::chrono::steady_clock::now();
    reducer.begin(world.size());
    reducer.finish();
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count());
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
    const double seconds = measure(unknown, /*least_parts=*/1, costs);
    if (unknown.empty()) return;
    cache_.write(costs);
    const std::string kept = cache_.path().empty() ? "" : ", kept in '" + cache_.path() + "'";
    rank_.context.logger.info(c10::str("measured the operators of ", unknown.size(), unknown.size() == 1 ? " graph in " : " graphs in ",
                                       seconds, " s", kept));
  }

  /// What the models were planned for, on what this step is given. Not kept: so slow the machine is now.
  void run_again(const step_internal::Call& call) {
    MeasuredCosts costs;
    // A rank has its stage in the caches, not the whole model. Plans need the whole in one go: parts of it that are run at
    // different times are not to be compared on a machine that changes its speed.
    const int pipeline_ranks = rank_.context.is_laid_out ? rank_.context.pipeline->size() : 1;
    measure(planned_graphs(call), pipeline_ranks, costs);
  }

 private:
  // Adds to `costs` what may be kept, and tells all ranks the rest too. Returns the seconds that operators took.
  double measure(const std::vector<GraphToPlan>& graphs, int least_parts, MeasuredCosts& costs) {
    const auto begin = std::chrono::steady_clock::now();
    runtime::Transport& world = *rank_.context.world;
    const std::vector<int64_t> averaged = gradients_to_average(rank_);
    send_to_all(world, encode_wanted(graphs, least_parts, averaged));
    GraphsMeasurement measurement(rank_, graphs, least_parts);
    const std::vector<GraphTimes> times = measurement.run();
    for (size_t g = 0; g < graphs.size(); ++g) costs.add(graphs[g].graph, times[g]);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    MeasuredCosts of_job = costs;
    if (std::vector<double> slowness = gathered_slowness(measurement.yardstick_us()); !slowness.empty()) of_job.set_slowness(std::move(slowness));
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

  // Without running the body: another step function's arguments, or a smaller batch's, do not fit and are made up.
  std::vector<GraphToPlan> planned_graphs(const step_internal::Call& call) {
    std::vector<GraphToPlan> graphs;
    std::set<const Program*> seen;
    for (const auto& model : rank_.models.all()) {
      const Program* program = model->first_program.get();
      if (program != nullptr && seen.insert(program).second) graphs.push_back({program->graph, first_microbatch(call, *model)});
    }
    return graphs;
  }

  std::vector<at::Tensor> first_microbatch(const step_internal::Call& call, const Model& model) {
    const bool shared = rank_.context.config.parallelism == Parallelism::kAuto;
    const step_internal::Share share{.microbatches = model.num_microbatches * (shared ? rank_.context.replicas->size() : 1)};
    try {
      return split_arguments(call.arguments(share), share).front();
    } catch (...) {
      return {};
    }
  }

  // Empty where some rank has not measured its speed.
  std::vector<double> gathered_slowness(double own_us) const {
    constexpr double kMost = 10;  // beyond that something else was measured than a rank's speed
    runtime::Transport& world = *rank_.context.world;
    std::vector<double> slowness{1};
    bool is_known = own_us > 0;
    for (int r = 1; r < world.size(); ++r) {
      const auto us = runtime::read_all(world.receive_bytes(r, runtime::kMeasureTag), "yardstick",
                                        [](runtime::WireReader& in) { return in.get<double>(); });
      is_known = is_known && us > 0;
      if (is_known) slowness.push_back(std::clamp(us / own_us, 1 / kMost, kMost));
    }
    return is_known ? slowness : std::vector<double>{};
  }

  RankState& rank_;
  CostCache cache_;
};

void send_yardstick(runtime::Transport& world, double us) {
  runtime::WireWriter out;
  out.put(us);
  world.send_bytes(0, runtime::kMeasureTag, out.take());
}

/// The ranks of the world but the first, which sends them what is wanted.
void measure_with_first(RankState& rank) {
  runtime::Transport& world = *rank.context.world;
  const Wanted wanted = decode_wanted(world.receive_bytes(0, runtime::kMeasureTag));
  GraphsMeasurement measurement(rank, wanted.graphs, wanted.least_parts);
  measurement.run();
  send_yardstick(world, measurement.yardstick_us());
  if (!wanted.averaged.empty()) averaging_us_per_mib(rank.context, wanted.averaged);
  rank.programs.measured_costs().add_json(world.receive_bytes(0, runtime::kMeasureTag));
}

// By the plans of rank 0.
void predict_again(RankState& rank) {
  runtime::Transport& world = *rank.context.world;
  if (world.rank() != 0) {
    return runtime::read_all(world.receive_bytes(0, runtime::kMeasureTag), "predicted steps", [&](runtime::WireReader& in) {
      for (const auto& model : rank.models.all()) model->predicted_step_us = in.get<double>();
    });
  }
  runtime::WireWriter out;
  for (const auto& model : rank.models.all()) {
    const auto& program = model->first_program;
    if (program != nullptr) model->predicted_step_us = rank.programs.predict_again(*program, model->num_microbatches);
    out.put(model->predicted_step_us);
  }
  send_to_all(world, out.take());
}

}  // namespace

std::string encode_wanted(const std::vector<GraphToPlan>& graphs, int least_parts, const std::vector<int64_t>& averaged) {
  runtime::WireWriter out;
  out.put(static_cast<int32_t>(least_parts));
  out.put(static_cast<int32_t>(averaged.size()));
  for (const int64_t elements : averaged) out.put(elements);
  out.put(static_cast<int32_t>(graphs.size()));
  for (const auto& [graph, inputs] : graphs) out.put(serialise(graph));
  return out.take();
}

Wanted decode_wanted(std::string_view bytes) {
  return runtime::read_all(bytes, "what is to be measured", [](runtime::WireReader& in) {
    Wanted wanted{.graphs = {}, .least_parts = in.get_at_least<int32_t>(1), .averaged = {}};
    wanted.averaged.resize(in.get_count<int32_t>(sizeof(int64_t)));
    int64_t left = kMostAveragedBytes / kBytesOfFloat;
    for (int64_t& elements : wanted.averaged) {
      elements = in.get_between<int64_t>(1, left);
      left -= elements;
    }
    wanted.graphs.resize(in.get_count<int32_t>(sizeof(uint64_t)));
    for (GraphToPlan& one : wanted.graphs) one.graph = deserialise_graph(in.get_text());
    return wanted;
  });
}

void measure_costs(RankState& rank, int step_number, const step_internal::Call& call) {
  const Context& context = rank.context;
  if (context.config.cost != CostSource::kMeasured || context.is_in_join) return;
  const auto& models = rank.models.all();
  const bool is_planned = std::all_of(models.begin(), models.end(), [&](const auto& model) { return rank.models.is_placed(*model); });
  const bool is_first = !is_planned && rank.measured_steps.insert(step_number).second;
  const bool again = std::exchange(rank.measures_again, false);
  if (!is_first && !again) return;
  runtime::Transport& world = *context.world;
  const bool leads = world.rank() == 0;
  try {
    std::optional<Measuring> measuring;
    if (leads) measuring.emplace(rank);
    if (is_first) leads ? measuring->run(call) : measure_with_first(rank);
    if (!again) return;
    leads ? measuring->run_again(call) : measure_with_first(rank);
    predict_again(rank);
  } catch (...) {  // the others would wait for this rank
    world.abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
}

}  // namespace smp::engine
