// Which microbatches meet in memory, and with what.
#include "partitioner/memory/peak_memory.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "partitioner/cost/memory_model.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/graph/tensor_bytes.h"
#include "partitioner/memory/rank_memory.h"
#include "partitioner/memory/stage_memory.h"
#include "partitioner/memory/stage_uses.h"

namespace smp::partitioner {
namespace {

/// What one rank holds in every moment of a step.
struct Fixed {
  int64_t parameters = 0;         // with buffers, constants and optimizer state
  int64_t largest_parameter = 0;  // of those that get a gradient
  int64_t step = 0;               // arguments and their microbatches
  int64_t tied = 0;               // what adding up the gradients of parameters that other ranks read too takes, at most
  int64_t messages = 0;
  int64_t shared_bucket = 0;  // that other replicas read
  int64_t always() const { return parameters + step + messages + shared_bucket; }
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

/// Every rank is called with the arguments of all microbatches. Rank 0 copies them apart where a part would not be aligned,
/// and once more where an operator writes to them. The last stage keeps the gradient of the loss.
int64_t step_bytes(const Graph& graph, const Plan& plan, int64_t num_microbatches, int rank) {
  constexpr int64_t kAlignment = 64;
  std::set<int32_t> written;
  for (const Node& node : graph.nodes) {
    written.insert(node.written_storages.begin(), node.written_storages.end());
  }
  int64_t bytes = 0;
  for (ValueId id : graph.inputs) {
    const int64_t part = graph.values[id].spec.num_bytes();
    bytes += part;
    if (rank != 0) continue;
    if (part % kAlignment != 0) bytes += rounded_up(part, kAlignment);
    if (written.contains(graph.values[id].storage)) bytes += part;
  }
  int64_t loss = 0;
  for (ValueId root : graph.backward_roots) {
    const NodeId producer = graph.values[root].producer;
    const bool is_here = producer != kNoNode && plan.stages[plan.stage_of_node[producer]].rank == rank;
    if (is_here) loss += 2 * graph.values[root].spec.num_bytes();
  }
  return num_microbatches * bytes + loss;
}

/// The sums of all shared parameters stand beside their gradients until the last is there; the first of the ranks that share
/// one also holds the gradient that came and, from the third rank on, the sum so far. (runtime/gradients/tied_gradients.cpp)
int64_t tied_bytes(const Graph& graph, const Plan& plan, int rank) {
  std::map<ValueId, std::set<int>> readers;
  for (const StagePlan& stage : plan.stages) {
    for (ValueId id : stage.parameters) readers[id].insert(stage.rank);
  }
  int64_t sums = 0, most = 0;
  for (const auto& [id, ranks] : readers) {
    if (ranks.size() < 2 || !ranks.contains(rank)) continue;
    const int64_t bytes = parameter_bytes(graph.values[id], 0).gradient;
    sums += bytes;
    most = std::max(most, rank == *ranks.begin() ? bytes * (ranks.size() == 2 ? 1 : 2) : 0);
  }
  return sums + most;
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

Fixed fixed_of(const Graph& graph, const Plan& plan, int rank, int64_t allocation_bytes, const RuntimeBehaviour& behaviour) {
  Fixed fixed;
  std::set<ValueId> held;  // two visits hold a parameter once
  int64_t gradients = 0, flags = 0;
  for (const StagePlan& stage : plan.stages) {
    if (stage.rank != rank) continue;
    for (ValueId id : stage.parameters) {
      if (!held.insert(id).second) continue;
      const ParameterBytes bytes = parameter_bytes(graph.values[id], behaviour.optimizer_state_factor);
      const int64_t allocated = rounded_up(bytes.parameter, allocation_bytes);
      const auto of_optimizer = std::llround(behaviour.optimizer_state_factor * static_cast<double>(allocated));
      fixed.parameters += allocated + (bytes.optimizer > 0 ? of_optimizer : 0);
      if (!graph.has_backward()) continue;
      fixed.largest_parameter = std::max(fixed.largest_parameter, bytes.gradient);
      gradients += bytes.gradient;
      flags += bytes.gradient > 0 ? static_cast<int64_t>(c10::elementSize(graph.values[id].spec.dtype)) : 0;
    }
  }
  if (behaviour.gradients_share_memory && behaviour.gradient_bucket_bytes > 0 && graph.has_backward()) {
    const int64_t block = std::max(behaviour.gradient_bucket_bytes, fixed.largest_parameter);
    fixed.shared_bucket = std::min(gradients, behaviour.num_gradient_blocks * block) + flags;
  }
  fixed.parameters += constant_bytes(graph, plan, rank);
  fixed.tied = graph.has_backward() ? tied_bytes(graph, plan, rank) : 0;
  return fixed;
}

/// What kernels and the autograd engine take for a moment and no table tells: at most 3 % more on
/// the models of the oracle (tests/unit/smp/zoo_memory_test.cpp).
int64_t with_margin(int64_t bytes) { return bytes + (bytes + 31) / 32; }

/// What averaging over replicas takes when the step ends: a bucket, what the others send for it, and a new gradient beside
/// the old one. Gradients of shared parameters, with those in their bucket, and all where nothing overlaps leave only then;
/// of the others the last bucket is still to come. (runtime/gradients/gradient_reducer.cpp)
int64_t reduction_bytes(const Fixed& fixed, const RankMemory& step, const RuntimeBehaviour& behaviour) {
  if (behaviour.gradient_bucket_bytes == 0) return 0;
  if (behaviour.gradients_overlap && fixed.tied == 0) return step.under_way + step.arriving;
  const int64_t bucket = std::min(step.gradients, std::max(behaviour.gradient_bucket_bytes, fixed.largest_parameter));
  return (behaviour.gradients_share_memory ? 0 : 2 * bucket) + fixed.largest_parameter;
}

int64_t end_bytes(const Fixed& fixed, const RankMemory& step, int64_t all_results, const RuntimeBehaviour& behaviour) {
  const auto optimizer = static_cast<int64_t>(
      std::llround(behaviour.optimizer_workspace_factor * static_cast<double>(fixed.largest_parameter)));
  return fixed.always() + step.gradients + all_results +
         std::max({optimizer, reduction_bytes(fixed, step, behaviour), fixed.tied});
}

/// Every rank ends up with all returned tensors: those of others come in a message and leave it,
/// its own ones are packed. One that shares its memory is copied for the caller. A bucket of
/// gradients may still be under way. (smp/engine/step/results.cpp)
int64_t exchange_bytes(const Fixed& fixed, const RankMemory& step, int64_t own, int64_t foreign, int num_ranks) {
  const int64_t messages = num_ranks > 1 ? own + foreign : 0;
  const int64_t copies = step.results > own ? own : 0;
  return fixed.always() + step.gradients + step.results + copies + foreign + messages + step.under_way;
}

}  // namespace

void add_memory(const Graph& graph, const Schedule& schedule, const DeviceModel& device, const RuntimeBehaviour& behaviour,
                Plan& plan) {
  const GradientFlow flow(graph);
  const Remade remade = remade_of(graph, flow, plan);
  std::vector<StageMemory> memory;
  for (size_t s = 0; s < plan.stages.size(); ++s) {
    const int64_t bucket_bytes = behaviour.gradients_overlap ? behaviour.gradient_bucket_bytes : 0;
    memory.push_back(stage_memory(graph, flow, plan, static_cast<int>(s), bucket_bytes, behaviour.gradients_share_memory,
                                  device.allocation_bytes, &remade));
    StageCost& cost = plan.stages[s].cost;
    cost.activation_bytes = memory[s].saved;
    cost.workspace_bytes = std::max(memory[s].forward, memory[s].later_backward) - memory[s].saved;
  }
  int64_t all_results = 0;
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    all_results += result_bytes(graph, plan, schedule.num_microbatches, rank);
  }
  plan.predicted_peak_bytes.clear();
  for (int rank = 0; rank < plan.num_ranks; ++rank) {
    const RankMemory step = rank_memory(graph, plan, schedule, rank, memory, behaviour.repeats_a_microbatch);
    Fixed fixed = fixed_of(graph, plan, rank, device.allocation_bytes, behaviour);
    fixed.step = step_bytes(graph, plan, schedule.num_microbatches, rank);
    fixed.messages = step.buffer_bytes();
    const auto on_rank = [rank](const StagePlan& stage) { return stage.rank == rank; };
    const auto first = std::find_if(plan.stages.begin(), plan.stages.end(), on_rank);
    if (first != plan.stages.end()) first->cost.message_bytes = fixed.messages;
    const int64_t own = result_bytes(graph, plan, schedule.num_microbatches, rank);
    plan.predicted_peak_bytes.push_back(with_margin(
        std::max({fixed.always() + step.peak, exchange_bytes(fixed, step, own, all_results - own, plan.num_ranks),
                  end_bytes(fixed, step, all_results, behaviour)})));
  }
}

}  // namespace smp::partitioner
