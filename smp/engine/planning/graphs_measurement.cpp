// Graphs cut into what memory holds, run in turns.
#include "smp/engine/planning/graphs_measurement.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "partitioner/partition/graph_costs.h"
#include "partitioner/partition/partition.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/libtorch/unmade.h"
#include "smp/engine/context/planned_device.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {

using namespace partitioner;

namespace {

// Gradients, activations and copies that measuring may take on each rank, in bytes.
constexpr int64_t kMeasuredAtOnce = int64_t{1} << 30;

int64_t most_bytes(const Plan& plan) {
  return *std::max_element(plan.predicted_peak_bytes.begin(), plan.predicted_peak_bytes.end());
}

/// As few parts as fit into memory one after the other.
Plan parts_of(const Graph& graph) {
  PartitionOptions options;
  Plan plan = partition(graph, options);
  const int64_t parts = std::min<int64_t>(1 + most_bytes(plan) / kMeasuredAtOnce, static_cast<int64_t>(graph.nodes.size()));
  for (options.request.num_ranks = static_cast<int>(parts); options.request.num_ranks > 1; options.request.num_ranks /= 2) {
    try {
      return partition(graph, options);
    } catch (const c10::ValueError&) {
      continue;  // it cannot be cut so often
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

}  // namespace

std::vector<GraphTimes> GraphsMeasurement::run() {
  std::vector<std::vector<Part>> together(1);  // first the graphs of one part, then each part of the others by itself
  for (size_t g = 0; g < graphs_.size(); ++g) {
    const Graph& graph = graphs_[g].graph;
    times_[g].resize(graph.nodes.size());
    plans_.push_back(is_only_libtorch(graph) ? parts_of(graph) : Plan());
    const size_t num_parts = plans_[g].stages.size();
    if (num_parts == 0) {
      rank_.context.logger.warning(
          "cost=measured: expected LibTorch's own operators, got others (smp::opaque) in the step body, which only training "
          "may run; its times are predicted.");
    }
    for (size_t s = 0; s < num_parts; ++s) (num_parts == 1 ? together.front() : together.emplace_back()).push_back({g, s});
  }
  for (const std::vector<Part>& parts : together) {
    if (!parts.empty()) measure_together(parts);
  }
  return std::move(times_);
}

void GraphsMeasurement::measure_together(const std::vector<Part>& parts) {
  constexpr double kSeconds = 0.3;
  const auto own = std::make_shared<runtime::OwnTensors>();
  const runtime::Launch& launch = rank_.context.launch;
  std::vector<runtime::StageMeasurement> measurements;
  std::vector<Part> measured;
  for (const Part& part : parts) {
    try {
      measurements.emplace_back(graphs_[part.graph].graph, plans_[part.graph], static_cast<int>(part.stage),
                                options_of(part, own));
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

// For an operator that wants more of its inputs than a shape.
void GraphsMeasurement::warn(const std::exception_ptr& error) const {
  rank_.context.logger.warning("cost=measured: some operators cannot be run on made-up inputs; their times are predicted: " +
                               runtime::describe_exception(error));
}

void GraphsMeasurement::keep(const Part& part, const runtime::StageTimes& of_part) {
  for (const NodeId n : plans_[part.graph].stages[part.stage].nodes) {
    const auto at = static_cast<size_t>(n);
    times_[part.graph][at] = OperatorTime{of_part.forward_us[at], of_part.backward_us[at]};
  }
}

runtime::MeasureOptions GraphsMeasurement::options_of(const Part& part,
                                                      const std::shared_ptr<runtime::OwnTensors>& own) const {
  const GraphToPlan& measured = graphs_[part.graph];
  const auto lookup = [this, &measured](ValueId id) { return tensor_of(measured.graph, measured.inputs, id); };
  return {.tape = rank_.context.config.stage == StageKind::kTape,
          .tensors = lookup,
          .expected_backward_us = graph_costs(measured.graph, planned_device(rank_.context).model).backward_us,
          .own = own};
}

at::Tensor GraphsMeasurement::tensor_of(const Graph& graph, const std::vector<at::Tensor>& inputs, ValueId id) const {
  const Value& value = graph.values[static_cast<size_t>(id)];
  const auto input = static_cast<size_t>(std::find(graph.inputs.begin(), graph.inputs.end(), id) - graph.inputs.begin());
  if (input < inputs.size()) return with_geometry(inputs[input], value.spec);
  const runtime::NamedTensor* known = is_named(value) ? rank_.models.bindings().find_named(value.name) : nullptr;
  const bool is_here = known != nullptr && rank_.models.is_here(known->tensor) && !runtime::is_unmade(known->tensor);
  return is_here ? known->tensor : at::Tensor();
}

}  // namespace smp::engine
