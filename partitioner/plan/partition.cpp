// Chooses between the exact chain split and placement by parameters, and enforces the memory limit.
#include "partitioner/plan/partition.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "partitioner/cost/memory_model.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/plan/build_plan.h"
#include "partitioner/plan/contiguous.h"
#include "partitioner/plan/graph_costs.h"
#include "partitioner/plan/peak_memory.h"
#include "partitioner/plan/pins.h"
#include "partitioner/plan/predict_step.h"
#include "partitioner/plan/visits.h"

namespace smp::partitioner {
namespace {

void check_options(const Graph& graph, const PartitionOptions& options) {
  TORCH_CHECK_VALUE(
      !graph.nodes.empty(),
      "partition: expected a graph with operators, got none. Call the model in the step "
      "body.");
  TORCH_CHECK_VALUE(options.num_ranks >= 1 && options.num_microbatches >= 1,
                    "partition: expected num_ranks >= 1 and num_microbatches >= 1, got ",
                    options.num_ranks, " and ", options.num_microbatches, ".");
  TORCH_CHECK_VALUE(
      options.optimizer_state_factor >= 0,
      "partition: expected optimizer_state_factor >= 0 (0 SGD, 1 momentum, 2 Adam), got ",
      options.optimizer_state_factor, ".");
  TORCH_CHECK_VALUE(
      options.optimizer_workspace_factor >= 0 && options.gradient_bucket_bytes >= 0,
      "partition: expected optimizer_workspace_factor >= 0 and gradient_bucket_bytes >= 0, got ",
      options.optimizer_workspace_factor, " and ", options.gradient_bucket_bytes, ".");
  TORCH_CHECK_VALUE(options.active_microbatches >= 0,
                    "partition: expected active_microbatches >= 0 (0: number of ranks), got ",
                    options.active_microbatches, ".");
  check_pins(graph, options);
}

/// By NodeId: bytes of the parameters that are read there first, never more than what a stage with
/// that node holds at its peak. A shared parameter counts at its first reader only. Where all
/// microbatches are in flight at once no gradient is there yet when most activations are.
std::vector<int64_t> least_bytes_by_node(const Graph& graph, const PartitionOptions& options) {
  const std::vector<int> in_flight = in_flight_by_stage(options, options.num_ranks);
  const bool meets_gradients =
      *std::max_element(in_flight.begin(), in_flight.end()) < options.num_microbatches;
  std::vector<int64_t> bytes(graph.nodes.size(), 0);
  std::vector<char> is_counted(graph.values.size(), 0);
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    for (ValueId id : node_inputs(graph.nodes[n])) {
      const Value& value = graph.values[id];
      if (!is_named(value) || std::exchange(is_counted[id], 1)) continue;
      const ParameterBytes of_value = parameter_bytes(value, options.optimizer_state_factor);
      bytes[n] += of_value.total() - (meets_gradients ? 0 : of_value.gradient);
    }
  }
  return bytes;
}

/// By NodeId: bytes of the parameters that are read there first. One that is read again far away (a
/// tied weight) counts there again: its readers will hardly share a stage. The finished plan is
/// checked exactly.
std::vector<int64_t> parameter_bytes_by_node(const Graph& graph, const PartitionOptions& options) {
  std::vector<int64_t> bytes(graph.nodes.size(), 0);
  std::vector<NodeId> last_reader(graph.values.size(), kNoNode);
  const auto far = static_cast<NodeId>(graph.nodes.size() / static_cast<size_t>(options.num_ranks));
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    for (ValueId id : node_inputs(graph.nodes[n])) {
      const Value& value = graph.values[id];
      if (!is_named(value)) continue;
      const bool is_counted = last_reader[id] != kNoNode && n - last_reader[id] <= far;
      last_reader[id] = n;
      if (!is_counted) bytes[n] += parameter_bytes(value, options.optimizer_state_factor).total();
    }
  }
  return bytes;
}

Chain make_chain(const Graph& graph, const GraphCosts& costs, const std::vector<double>& traffic_us,
                 const std::vector<char>& cut_allowed, const PartitionOptions& options) {
  Chain chain;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    chain.time_us.push_back(costs.forward_us[n] + costs.backward_us[n]);
  }
  chain.fixed_bytes = parameter_bytes_by_node(graph, options);
  chain.activation_bytes = costs.activation_bytes;
  chain.send_us = chain.receive_us = traffic_us;
  chain.cut_allowed = cut_allowed;
  for (int in_flight : in_flight_by_stage(options, options.num_ranks)) {
    chain.stages.push_back({in_flight, options.memory_limit_bytes});
  }
  return chain;
}

/// The blocks between allowed cuts: first node of each.
std::vector<int> block_starts(const std::vector<char>& cut_allowed) {
  std::vector<int> starts;
  for (size_t p = 0; p + 1 < cut_allowed.size(); ++p) {
    if (p == 0 || cut_allowed[p]) starts.push_back(static_cast<int>(p));
  }
  return starts;
}

void add_pins(const std::vector<int>& starts, const std::vector<RankSet>& allowed, Chain& chain) {
  const bool has_pins =
      std::any_of(allowed.begin(), allowed.end(), [](const RankSet& set) { return !set.empty(); });
  if (!has_pins) return;
  chain.first_stage.assign(chain.time_us.size(), 0);
  chain.last_stage.assign(chain.time_us.size(), chain.num_stages() - 1);
  for (size_t b = 0; b < starts.size(); ++b) {
    if (allowed[b].empty()) continue;
    chain.first_stage[starts[b]] = allowed[b].front();
    chain.last_stage[starts[b]] = allowed[b].back();
  }
}

StageAssignment assign(const ChainSplit& split) {
  StageAssignment assignment;
  for (int s = 0; s < split.num_used_stages; ++s) {
    assignment.rank_of_stage.push_back(s);
    assignment.stage_of_node.resize(split.cuts[s + 1], s);
  }
  return assignment;
}

StageAssignment assign(const std::vector<int>& starts, const std::vector<int>& rank_of_block,
                       size_t num_nodes) {
  StageAssignment assignment;
  for (size_t b = 0; b < starts.size(); ++b) {
    if (b == 0 || rank_of_block[b] != rank_of_block[b - 1]) {
      assignment.rank_of_stage.push_back(rank_of_block[b]);
    }
    const size_t end = b + 1 < starts.size() ? static_cast<size_t>(starts[b + 1]) : num_nodes;
    assignment.stage_of_node.resize(end, static_cast<int>(assignment.rank_of_stage.size()) - 1);
  }
  return assignment;
}

int64_t largest_peak(const Plan& plan) {
  return *std::max_element(plan.predicted_peak_bytes.begin(), plan.predicted_peak_bytes.end());
}

int64_t largest_excess(const Plan& plan, int64_t limit) {
  return limit < 0 ? 0 : std::max<int64_t>(0, largest_peak(plan) - limit);
}

void refuse_memory(int64_t needed, const PartitionOptions& options) {
  TORCH_CHECK_VALUE(false, "partition: expected a memory limit of at least ", needed,
                    " bytes per rank, got ", options.memory_limit_bytes, " with ",
                    options.num_ranks, " ranks and ", options.num_microbatches,
                    " microbatches. Raise the limit to ", needed,
                    " bytes, use more ranks, more (smaller) microbatches, fewer "
                    "active_microbatches, or an optimizer with less state.");
}

/// A plan within the limit, or by how many bytes the limit was missed (more may be missing).
struct Attempt {
  std::optional<Plan> plan;
  int64_t missing_bytes = 0;
};

/// What the chain counts for a stage of `split`.
int64_t counted_bytes(const Chain& chain, const ChainSplit& split, size_t stage) {
  int64_t bytes = 0;
  for (int i = split.cuts[stage]; i < split.cuts[stage + 1]; ++i) {
    bytes += chain.fixed_bytes[i] + chain.stages[stage].in_flight * chain.activation_bytes[i];
  }
  return bytes;
}

/// The chain counts less than a stage holds (workspaces, messages, storages that several stages
/// keep). Where the finished plan is over the limit for that reason, that stage is allowed as much
/// less than it has now and the split is made again.
Attempt split_within(int64_t limit_bytes, const Graph& graph, const GraphCosts& costs, Chain chain,
                     const PartitionOptions& options) {
  constexpr int kMaxSplits = 8;
  for (auto& limits : chain.stages) limits.memory_bytes = limit_bytes;
  Attempt attempt;
  for (int i = 0; i < kMaxSplits; ++i) {
    if (const int64_t growth = smallest_memory_growth(chain); growth > 0) {
      if (i == 0) attempt.missing_bytes = growth;
      return attempt;
    }
    const ChainSplit split = split_chain(chain);
    Plan plan = build_plan(graph, costs, assign(split), options);
    const int64_t excess = largest_excess(plan, limit_bytes);
    if (excess == 0) return {std::move(plan), 0};
    attempt.missing_bytes = i == 0 ? excess : std::min(attempt.missing_bytes, excess);
    for (size_t rank = 0; rank < chain.stages.size(); ++rank) {
      const int64_t over = plan.predicted_peak_bytes[rank] - limit_bytes;
      if (over <= 0) continue;
      chain.stages[rank].memory_bytes =
          std::max<int64_t>(0, counted_bytes(chain, split, rank) - over);
    }
  }
  return attempt;
}

/// First with a count that excludes no split which fits, then with one closer to what a stage
/// holds.
Attempt split_within(int64_t limit_bytes, const Graph& graph, const GraphCosts& costs,
                     const Chain& least, const Chain& usual, const PartitionOptions& options) {
  Attempt attempt = split_within(limit_bytes, graph, costs, least, options);
  if (attempt.plan) return attempt;
  Attempt second = split_within(limit_bytes, graph, costs, usual, options);
  if (!second.plan) second.missing_bytes = std::min(attempt.missing_bytes, second.missing_bytes);
  return second;
}

Plan split_within_memory(const Graph& graph, const GraphCosts& costs, const Chain& usual,
                         const PartitionOptions& options) {
  Chain least = usual;
  least.fixed_bytes = least_bytes_by_node(graph, options);
  const auto try_limit = [&](int64_t bytes) {
    return split_within(bytes, graph, costs, least, usual, options);
  };
  Attempt attempt = try_limit(options.memory_limit_bytes);
  if (attempt.plan) return std::move(*attempt.plan);
  // The limit that the message names has been tried. The least step grows, so that this ends soon.
  int64_t needed = options.memory_limit_bytes;
  for (int64_t least_step = 1; !attempt.plan; least_step *= 2) {
    needed += std::max(attempt.missing_bytes, least_step);
    attempt = try_limit(needed);
  }
  const int64_t peak = largest_peak(*attempt.plan);
  refuse_memory(try_limit(peak).plan ? peak : needed, options);
  return {};
}

Plan place(const Graph& graph, const PartitionOptions& options) {
  const GraphCosts costs = graph_costs(graph, options.device);
  const std::vector<double> traffic_us = cut_traffic_us(graph, options.device);
  const std::vector<char> cut_allowed = allowed_cuts(graph);
  const std::vector<int> starts = block_starts(cut_allowed);
  const std::vector<RankSet> allowed = allowed_ranks(graph, starts, options);
  if (options.auto_partition && options.owners.empty()) {
    Chain chain = make_chain(graph, costs, traffic_us, cut_allowed, options);
    add_pins(starts, allowed, chain);
    if (pins_leave_a_split(chain)) {
      return split_within_memory(graph, costs, chain, options);
    }
  }
  std::vector<double> switch_us;
  for (int start : starts) switch_us.push_back(options.device.link_latency_us + traffic_us[start]);
  const std::vector<int> rank_of_block =
      cheapest_ranks(allowed, switch_us, options.device.link_latency_us, options.num_ranks);
  Plan plan = build_plan(graph, costs, assign(starts, rank_of_block, graph.nodes.size()), options);
  const int64_t excess = largest_excess(plan, options.memory_limit_bytes);
  if (excess > 0) refuse_memory(options.memory_limit_bytes + excess, options);
  return plan;
}

}  // namespace

Plan partition(const Graph& graph, const PartitionOptions& options) {
  check_options(graph, options);
  Plan plan = place(graph, options);
  const StepPrediction step = predict_step(graph, plan, options);
  plan.predicted_step_us = step.us;
  plan.predicted_bubble = step.bubble;
  return plan;
}

}  // namespace smp::partitioner
