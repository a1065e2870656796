// Which microbatches meet in memory, and with what.
#include "partitioner/plan/peak_memory.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "partitioner/cost/memory_model.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/plan/graph_costs.h"
#include "partitioner/plan/message_buffers.h"
#include "partitioner/plan/stage_memory.h"
#include "partitioner/schedule/generate.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {
namespace {

// Messages of one edge that hold a buffer while their receives are posted: one that is being
// packed, one on its way, one that has left since the sender last looked.
constexpr int64_t kSendsPending = 3;

int rank_of(const Plan& plan, int stage) {
  return stage == kInputStage ? 0 : plan.stages[stage].rank;
}

/// Bytes of the messages on each edge for one microbatch.
std::map<Edge, int64_t> edge_bytes(const Graph& graph, const Plan& plan) {
  std::map<Edge, int64_t> bytes;
  for (const auto* transfers : {&plan.activations, &plan.gradients}) {
    for (const Transfer& transfer : *transfers) {
      if (rank_of(plan, transfer.source) == rank_of(plan, transfer.target)) continue;
      bytes[{transfer.source, transfer.target}] +=
          message_bytes(graph.values[transfer.value]) + kMessageOverheadBytes;
    }
  }
  return bytes;
}

/// Messages that come to a stage for one microbatch in one direction.
struct Arrivals {
  int64_t num_edges = 0;
  int64_t bytes = 0;
  /// Of the next `num_ahead`.
  int64_t ahead(int64_t num_ahead, int64_t num_microbatches) const {
    const int64_t num = std::min(num_ahead, num_microbatches * num_edges);
    return num_edges == 0 ? 0 : (num * bytes + num_edges - 1) / num_edges;
  }
};

/// Receives that are posted ahead, and sends that hold their buffer. Simple: first all activations
/// come, then all gradients. Interleaved: in turn. Activations may have to wait for a rank that has
/// not begun the step: as many as the sender may have in flight.
void add_message_bytes(const Graph& graph, const PartitionOptions& options, Plan& plan) {
  const std::map<Edge, int64_t> bytes_of_edge = edge_bytes(graph, plan);
  const int64_t num_microbatches = options.num_microbatches;
  const auto sender = [&](const Edge& edge) {
    const auto on_rank_0 = [](const StagePlan& stage) { return stage.rank == 0; };
    if (edge.source != kInputStage) return edge.source;
    return static_cast<int>(std::find_if(plan.stages.begin(), plan.stages.end(), on_rank_0) -
                            plan.stages.begin());
  };
  const auto in_flight = in_flight_by_stage(options, static_cast<int>(plan.stages.size()));
  for (int s = 0; s < static_cast<int>(plan.stages.size()); ++s) {
    Arrivals activations, gradients;
    int64_t sent = 0;
    for (const auto& [edge, bytes] : bytes_of_edge) {
      const bool is_activation = edge.source < edge.target;
      if (sender(edge) == s) {
        const int64_t waiting = is_activation ? in_flight[static_cast<size_t>(s)] : 0;
        sent += bytes * std::min(num_microbatches, std::max(kSendsPending, waiting));
      }
      if (edge.target != s) continue;
      Arrivals& arrivals = is_activation ? activations : gradients;
      ++arrivals.num_edges;
      arrivals.bytes += bytes;
    }
    const Arrivals both{activations.num_edges + gradients.num_edges,
                        activations.bytes + gradients.bytes};
    const int64_t received = options.schedule == ScheduleKind::kSimple
                                 ? std::max(activations.ahead(kReceivesAhead, num_microbatches),
                                            gradients.ahead(kReceivesAhead, num_microbatches))
                                 : both.ahead(kReceivesAhead, num_microbatches);
    plan.stages[s].cost.message_bytes = received + sent;
  }
}

/// What one rank holds in every moment of a step, and what gradients add to it.
struct Fixed {
  int64_t parameters = 0;  // with buffers, constants and optimizer state
  int64_t gradients = 0;
  int64_t largest_parameter = 0;  // of those with gradient
  int64_t step = 0;               // arguments, their microbatches, results of this rank
  int64_t foreign_results = 0;    // returned tensors that other ranks make
  int64_t own_results = 0;
  int64_t tied = 0;  // what adding up the gradients of one shared parameter takes, at most
  int64_t messages = 0;
  int64_t always() const { return parameters + step + messages; }
};

int64_t constant_bytes(const Graph& graph, const Plan& plan, int rank) {
  std::set<ValueId> held;
  for (const StagePlan& stage : plan.stages) {
    for (NodeId n : stage.nodes) {
      for (ValueId id : node_inputs(graph.nodes[n])) {
        const bool is_constant = graph.values[id].kind == ValueKind::kConstant;
        if (is_constant && (rank == 0 || stage.rank == rank)) held.insert(id);
      }
    }
  }
  int64_t bytes = 0;
  for (ValueId id : held) bytes += extent_bytes(graph.values[id].spec);
  return bytes;
}

/// Every rank is called with the arguments of all microbatches; rank 0 also copies them apart.
/// Results stay where they are made until the step ends.
int64_t step_bytes(const Graph& graph, const Plan& plan, int64_t num_microbatches, int rank) {
  int64_t bytes = 0;
  for (ValueId id : graph.inputs) {
    bytes += graph.values[id].spec.num_bytes() * (rank == 0 ? 2 : 1);
  }
  for (ValueId id : graph.returned) {
    const NodeId producer = graph.values[id].producer;
    const bool is_here =
        producer != kNoNode && plan.stages[plan.stage_of_node[producer]].rank == rank;
    if (is_here) bytes += graph.values[id].spec.num_bytes();
  }
  return num_microbatches * bytes;
}

/// By parameter with gradient: the ranks that read it.
std::map<ValueId, std::set<int>> readers_of_parameters(const Graph& graph, const Plan& plan) {
  std::map<ValueId, std::set<int>> ranks;
  for (const StagePlan& stage : plan.stages) {
    for (ValueId id : stage.parameters) {
      if (parameter_bytes(graph.values[id], 0).gradient > 0) ranks[id].insert(stage.rank);
    }
  }
  return ranks;
}

/// The first of the ranks that share a parameter adds up: a message, the gradient in it, the sum,
/// and from the third rank on the sum so far. (runtime/reducer.cpp)
int64_t tied_bytes(const Graph& graph, const Plan& plan, int rank) {
  int64_t most = 0;
  for (const auto& [id, ranks] : readers_of_parameters(graph, plan)) {
    if (ranks.size() < 2 || !ranks.contains(rank)) continue;
    const int64_t copies = ranks.size() == 2 ? 3 : 4;
    most = std::max(most, copies * parameter_bytes(graph.values[id], 0).gradient);
  }
  return most;
}

/// Bytes of the returned tensors of all microbatches that `rank` makes; step inputs are rank 0's.
int64_t result_bytes(const Graph& graph, const Plan& plan, int64_t num_microbatches, int rank) {
  int64_t bytes = 0;
  for (ValueId id : graph.returned) {
    const NodeId producer = graph.values[id].producer;
    const int owner = producer == kNoNode ? 0 : plan.stages[plan.stage_of_node[producer]].rank;
    if (owner == rank) bytes += graph.values[id].spec.num_bytes();
  }
  return num_microbatches * bytes;
}

Fixed fixed_of(const Graph& graph, const PartitionOptions& options, const Plan& plan, int rank) {
  Fixed fixed;
  std::set<ValueId> held;  // two visits hold a parameter once
  for (const StagePlan& stage : plan.stages) {
    if (stage.rank != rank) continue;
    fixed.messages += stage.cost.message_bytes;
    for (ValueId id : stage.parameters) {
      if (!held.insert(id).second) continue;
      const ParameterBytes bytes =
          parameter_bytes(graph.values[id], options.optimizer_state_factor);
      fixed.parameters += bytes.parameter + bytes.optimizer;
      fixed.gradients += bytes.gradient;
      fixed.largest_parameter = std::max(fixed.largest_parameter, bytes.gradient);
    }
  }
  fixed.parameters += constant_bytes(graph, plan, rank);
  fixed.step = step_bytes(graph, plan, options.num_microbatches, rank);
  fixed.tied = tied_bytes(graph, plan, rank);
  for (int owner = 0; owner < options.num_ranks; ++owner) {
    const int64_t bytes = result_bytes(graph, plan, options.num_microbatches, owner);
    (owner == rank ? fixed.own_results : fixed.foreign_results) += bytes;
  }
  return fixed;
}

int64_t end_bytes(const Fixed& fixed, const PartitionOptions& options) {
  const auto optimizer = static_cast<int64_t>(std::llround(
      options.optimizer_workspace_factor * static_cast<double>(fixed.largest_parameter)));
  const int64_t bucket = std::min(
      fixed.gradients, std::max(options.gradient_bucket_bytes,
                                options.gradient_bucket_bytes > 0 ? fixed.largest_parameter : 0));
  return fixed.always() + fixed.gradients + fixed.foreign_results +
         std::max({optimizer, bucket, fixed.tied});
}

/// Every rank ends up with all returned tensors: those of others come in a message and leave it,
/// its own ones are copied for the caller and packed. (smp/detail/results.cpp)
int64_t results_bytes(const Fixed& fixed, int num_ranks) {
  const int64_t exchanged =
      num_ranks > 1 ? 2 * fixed.foreign_results + 2 * fixed.own_results : fixed.own_results;
  return fixed.always() + fixed.gradients + exchanged;
}

/// The peak of a rank with one stage.
int64_t step_peak(const Fixed& fixed, const StageMemory& stage, int64_t in_flight,
                  int64_t num_microbatches) {
  const int64_t others = (in_flight - 1) * stage.saved;
  const int64_t gradients_in_forward = num_microbatches > in_flight ? fixed.gradients : 0;
  int64_t peak = fixed.always() + others +
                 std::max(stage.forward + gradients_in_forward, stage.first_backward);
  if (num_microbatches > 1) {
    const int64_t later_others = (std::min(in_flight, num_microbatches - 1) - 1) * stage.saved;
    peak = std::max(peak, fixed.always() + fixed.gradients + later_others + stage.later_backward);
  }
  return peak;
}

}  // namespace

std::vector<int> in_flight_by_stage(const PartitionOptions& options, int num_stages) {
  std::vector<int> limits = in_flight_limits(options.schedule, options.num_ranks, num_stages,
                                             options.num_microbatches, options.active_microbatches);
  for (int& limit : limits) limit = std::min(limit, options.num_microbatches);
  return limits;
}

void add_memory(const Graph& graph, const PartitionOptions& options, Plan& plan) {
  std::vector<StageMemory> memory;
  add_message_bytes(graph, options, plan);
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    memory.push_back(stage_memory(graph, plan, static_cast<int>(s)));
    StageCost& cost = plan.stages[s].cost;
    cost.activation_bytes = memory[s].saved;
    cost.workspace_bytes = std::max(memory[s].forward, memory[s].later_backward) - memory[s].saved;
  }
  const auto in_flight = in_flight_by_stage(options, static_cast<int>(plan.stages.size()));
  plan.predicted_peak_bytes.clear();
  for (int rank = 0; rank < options.num_ranks; ++rank) {
    const Fixed fixed = fixed_of(graph, options, plan, rank);
    int64_t saved = 0, workspace = 0;
    std::vector<size_t> visits;
    for (size_t s = 0; s < plan.stages.size(); ++s) {
      if (plan.stages[s].rank != rank) continue;
      visits.push_back(s);
      saved += in_flight[s] * plan.stages[s].cost.activation_bytes;
      workspace = std::max(workspace, plan.stages[s].cost.workspace_bytes);
    }
    // Where a rank has several stages, the gradients of one are there in the first backward of
    // another.
    const int64_t peak =
        visits.size() == 1
            ? step_peak(fixed, memory[visits[0]], in_flight[visits[0]], options.num_microbatches)
            : fixed.always() + fixed.gradients + saved + workspace;
    plan.predicted_peak_bytes.push_back(
        std::max({peak, results_bytes(fixed, options.num_ranks), end_bytes(fixed, options)}));
  }
}

}  // namespace smp::partitioner
