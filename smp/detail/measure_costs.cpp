// Graphs out, times back.
#include "smp/detail/measure_costs.h"

#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <numeric>
#include <optional>
#include <sstream>

#include "partitioner/graph/graph_io.h"
#include "partitioner/plan/graph_costs.h"
#include "partitioner/plan/partition.h"
#include "runtime/delayed/unmade.h"
#include "runtime/gradient_reducer.h"
#include "runtime/stage/measure_stage.h"
#include "runtime/tags.h"
#include "runtime/watch/root_cause.h"
#include "runtime/wire.h"
#include "smp/detail/auto_layout.h"
#include "smp/detail/cost_cache.h"
#include "smp/detail/rank_state.h"

namespace smp::detail {

using namespace partitioner;

namespace {

// Gradients, activations and copies that measuring may take on each rank, in bytes.
constexpr int64_t kMeasuredAtOnce = int64_t{1} << 30;

constexpr int64_t kBytesOfFloat = sizeof(float);

int64_t most_bytes(const Plan& plan) {
  return *std::max_element(plan.predicted_peak_bytes.begin(), plan.predicted_peak_bytes.end());
}

/// As few parts as fit into memory one after the other.
Plan parts_of(const Graph& graph) {
  PartitionOptions options;
  Plan plan = partition(graph, options);
  const int64_t parts = std::min<int64_t>(1 + most_bytes(plan) / kMeasuredAtOnce, static_cast<int64_t>(graph.nodes.size()));
  for (options.num_ranks = static_cast<int>(parts); options.num_ranks > 1; options.num_ranks /= 2) {
    try {
      return partition(graph, options);
    } catch (const c10::ValueError&) {  // it cannot be cut so often
    }
  }
  return plan;
}

// Code of others may do more than compute, and must not do it on made-up numbers.
bool is_only_libtorch(const Graph& graph) {
  return std::all_of(graph.nodes.begin(), graph.nodes.end(), [](const Node& node) { return node.op.starts_with("aten::"); });
}

/// A copy of `tensor` with the geometry that was recorded; undefined where it is another tensor.
at::Tensor with_geometry(const at::Tensor& tensor, const TensorSpec& spec) {
  const bool fits =
      tensor.defined() && tensor.sizes() == spec.sizes && tensor.scalar_type() == spec.dtype && spec.storage_offset == 0;
  return fits ? at::empty_strided(spec.sizes, spec.strides, tensor.options()).copy_(tensor) : at::Tensor();
}

/// By NodeId; none for operators that cannot be run like that.
using GraphTimes = std::vector<std::optional<OperatorTime>>;

/// The graphs of a step; those without inputs run on made-up ones.
class GraphsMeasurement {
 public:
  GraphsMeasurement(RankState& rank, const std::vector<GraphToPlan>& graphs)
      : rank_(rank), graphs_(graphs), times_(graphs.size()) {}

  std::vector<GraphTimes> run() {
    std::vector<Part> whole, parts;
    for (size_t g = 0; g < graphs_.size(); ++g) {
      const Graph& graph = graphs_[g].graph;
      times_[g].resize(graph.nodes.size());
      plans_.push_back(is_only_libtorch(graph) ? parts_of(graph) : Plan());
      const size_t num_parts = plans_[g].stages.size();
      if (num_parts == 0) {
        rank_.context.logger.warning("cost=measured: expected LibTorch's own operators, got others (smp::opaque) in the step "
                                     "body, which only training may run; its times are predicted.");
      }
      for (size_t s = 0; s < num_parts; ++s) (num_parts == 1 ? whole : parts).push_back({g, s});
    }
    measure_together(whole);
    for (const Part& part : parts) measure_together({part});
    return std::move(times_);
  }

 private:
  struct Part {
    size_t graph, stage;
  };

  void measure_together(const std::vector<Part>& parts) {
    constexpr double kSeconds = 0.3;
    const auto own = std::make_shared<runtime::OwnTensors>();
    const runtime::Launch& launch = rank_.context.launch;
    std::vector<runtime::StageMeasurement> measurements;
    std::vector<Part> measured;
    for (const Part& part : parts) {
      try {
        measurements.emplace_back(graphs_[part.graph].graph, plans_[part.graph], static_cast<int>(part.stage),
                                  options_of(part.graph, own));
        measured.push_back(part);
      } catch (...) {
        warn(std::current_exception());
      }
    }
    const double phase = static_cast<double>(launch.local_rank) / std::max(1, launch.local_size);
    const auto errors = runtime::measure_in_turns(measurements, kSeconds, phase);
    for (size_t i = 0; i < measured.size(); ++i) {
      if (errors[i]) {
        warn(errors[i]);
      } else {
        keep(measured[i], measurements[i].times());
      }
    }
  }

  // An operator that wants more of its inputs than a shape.
  void warn(const std::exception_ptr& error) const {
    rank_.context.logger.warning("cost=measured: some operators cannot be run on made-up inputs; their times are predicted: " +
                                 runtime::describe_exception(error));
  }

  void keep(const Part& part, const runtime::StageTimes& of_part) {
    for (const NodeId n : plans_[part.graph].stages[part.stage].nodes) {
      const auto at = static_cast<size_t>(n);
      times_[part.graph][at] = OperatorTime{of_part.forward_us[at], of_part.backward_us[at], of_part.jitter};
    }
  }

  runtime::MeasureOptions options_of(size_t g, const std::shared_ptr<runtime::OwnTensors>& own) const {
    const Graph& graph = graphs_[g].graph;
    const auto lookup = [this, g](ValueId id) { return tensor_of(graphs_[g], id); };
    return {.tape = rank_.context.config.stage == StageKind::kTape,
            .tensors = lookup,
            .expected_backward_us = graph_costs(graph, DeviceModel{}).backward_us,
            .own = own};
  }

  at::Tensor tensor_of(const GraphToPlan& wanted, ValueId id) const {
    const auto& [graph, inputs] = wanted;
    const Value& value = graph.values[static_cast<size_t>(id)];
    const auto input = static_cast<size_t>(std::find(graph.inputs.begin(), graph.inputs.end(), id) - graph.inputs.begin());
    if (input < inputs.size()) return with_geometry(inputs[input], value.spec);
    const auto& named = rank_.models.bindings().tensors();
    const auto known = std::find_if(named.begin(), named.end(), [&](const auto& one) { return one.name == value.name; });
    const bool is_here = is_named(value) && known != named.end() && rank_.models.is_here(known->tensor) &&
                         !runtime::is_unmade(known->tensor);
    return is_here ? known->tensor : at::Tensor();
  }

  RankState& rank_;
  const std::vector<GraphToPlan>& graphs_;
  std::vector<Plan> plans_;  // none for a graph that is not run
  std::vector<GraphTimes> times_;
};

// Elements of the gradients whose averaging is timed; none: nothing is ever averaged. Many small ones take longer than one,
// and what fits a cache takes less than what does not: so those of the model, but of a large one no more than half of what a
// rank will have, for each stands beside a parameter of its own.
std::vector<int64_t> gradients_to_average(const RankState& rank) {
  constexpr int64_t kMostBytes = int64_t{1} << 28, kLeastBytes = int64_t{1} << 20;
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
  const int64_t most = std::clamp(bytes / stages / 2, kLeastBytes, kMostBytes);
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

/// What the other ranks are to measure with rank 0.
struct Wanted {
  std::vector<GraphToPlan> graphs;  // without inputs
  std::vector<int64_t> averaged{};
};

std::string encode(const std::vector<GraphToPlan>& graphs, const std::vector<int64_t>& averaged) {
  runtime::WireWriter out;
  out.put(static_cast<int32_t>(averaged.size()));
  for (const int64_t elements : averaged) out.put(elements);
  out.put(static_cast<int32_t>(graphs.size()));
  for (const auto& [graph, inputs] : graphs) out.put(serialise(graph));
  return out.take();
}

Wanted decode(const std::string& bytes) {
  runtime::WireReader in(bytes);
  Wanted wanted;
  wanted.averaged.resize(static_cast<size_t>(in.get<int32_t>()));
  for (int64_t& elements : wanted.averaged) elements = in.get<int64_t>();
  wanted.graphs.resize(static_cast<size_t>(in.get<int32_t>()));
  for (GraphToPlan& one : wanted.graphs) one.graph = deserialise_graph(in.get_string());
  return wanted;
}

/// World rank 0.
class Measuring {
 public:
  explicit Measuring(RankState& rank)
      : rank_(rank), cache_(rank.context.config, rank.context.launch.local_size, rank.context.logger) {}

  void run(const step_internal::Call& call) {
    runtime::Transport& world = *rank_.context.world;
    MeasuredCosts costs = cache_.read();
    std::vector<GraphToPlan> unknown;
    for (GraphToPlan& wanted : wanted_graphs(call)) {
      if (!costs.covers(wanted.graph)) unknown.push_back(std::move(wanted));
    }
    const std::vector<int64_t> averaged = gradients_to_average(rank_);
    send_to_all(world, encode(unknown, averaged));
    measure_all(unknown, costs);
    // Not kept: the next job may have another network.
    if (!averaged.empty()) costs.set_averaging_us_per_mib(averaging_us_per_mib(rank_.context, averaged));
    const std::string text = costs.to_json();
    send_to_all(world, text);
    rank_.programs.measured_costs().add_json(text);  // the same numbers as everywhere, to the last digit
  }

 private:
  // The others wait for an answer, and the step itself refuses what is wrong with it.
  std::vector<GraphToPlan> wanted_graphs(const step_internal::Call& call) {
    try {
      return graphs_to_plan(rank_, call);
    } catch (...) {
      return {};
    }
  }

  void measure_all(const std::vector<GraphToPlan>& graphs, MeasuredCosts& costs) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<GraphTimes> times = GraphsMeasurement(rank_, graphs).run();
    for (size_t g = 0; g < graphs.size(); ++g) costs.add(graphs[g].graph, times[g]);
    std::ostringstream text;
    if (graphs.empty()) {
      if (costs.size() == 0) return;
      text << "times of " << costs.size() << " operators are known from '" << cache_.path() << "'";
    } else {
      cache_.write(costs);
      text << "measured the operators of " << graphs.size() << (graphs.size() == 1 ? " graph in " : " graphs in ")
           << std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() << " s";
      if (!cache_.path().empty()) text << ", kept in '" << cache_.path() << "'";
    }
    rank_.context.logger.info(text.str());
  }

  RankState& rank_;
  CostCache cache_;
};

}  // namespace

void measure_costs(RankState& rank, int step_number, const step_internal::Call& call) {
  const Context& context = rank.context;
  if (context.config.cost != CostSource::kMeasured || context.is_in_join) return;
  const auto& models = rank.models.all();
  const bool is_planned = std::all_of(models.begin(), models.end(), [&](const auto& model) { return rank.models.is_placed(*model); });
  if (is_planned || !rank.measured_steps.insert(step_number).second) return;
  runtime::Transport& world = *context.world;
  try {
    if (world.rank() == 0) return Measuring(rank).run(call);
    const Wanted wanted = decode(world.receive_bytes(0, runtime::kMeasureTag));
    GraphsMeasurement(rank, wanted.graphs).run();
    if (!wanted.averaged.empty()) averaging_us_per_mib(context, wanted.averaged);
    rank.programs.measured_costs().add_json(world.receive_bytes(0, runtime::kMeasureTag));
  } catch (...) {  // the others would wait for this rank
    world.abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
}

}  // namespace smp::detail
