// A column of a schedule, performed on sizes.
#include "partitioner/memory/rank_memory.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "partitioner/cost/memory_model.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/plan/message_rules.h"
#include "partitioner/schedule/stage_graph.h"

namespace smp::partitioner {
namespace {

constexpr int64_t kAlignment = 64;  // a slice begins anywhere

/// The values of each edge, by direction.
using EdgeValues = std::map<Edge, std::vector<ValueId>>;

EdgeValues by_edge(const std::vector<Transfer>& transfers) {
  EdgeValues values;
  for (const Transfer& transfer : transfers) {
    values[{transfer.source, transfer.target}].push_back(transfer.value);
  }
  return values;
}

/// Bytes of the gradient of `id` as it leaves `stage`, if that is a slice of a larger tensor: the
/// gradient of a part of a cat keeps the strides of the whole. 0 otherwise.
int64_t slice_bytes(const Graph& graph, const Plan& plan, int stage, ValueId id) {
  const Node* reader = nullptr;
  for (NodeId n : plan.stages[static_cast<size_t>(stage)].nodes) {
    const std::vector<ValueId> inputs = node_inputs(graph.nodes[n]);
    if (std::find(inputs.begin(), inputs.end(), id) == inputs.end()) continue;
    if (reader != nullptr) return 0;  // a sum of several, which is a tensor of its own
    reader = &graph.nodes[n];
  }
  if (reader == nullptr || reader->op != "aten::cat" || reader->outputs.front() == kNoValue) return 0;
  const TensorSpec& part = graph.values[id].spec;
  const TensorSpec& whole = graph.values[reader->outputs.front()].spec;
  if (part.sizes.size() != whole.sizes.size()) return 0;
  TensorSpec slice = part;
  slice.strides = whole.strides;
  const int64_t bytes = extent_bytes(slice);
  return bytes > buffer_bytes(graph.values[id]) ? bytes : 0;
}

/// Counts of things in use by size, and the most there ever were of each.
class BufferMeter {
 public:
  void take(int64_t capacity) { most_[capacity] = std::max(most_[capacity], ++now_[capacity]); }
  void give_back(int64_t capacity) { --now_[capacity]; }
  const BufferCounts& most() const { return most_; }

 private:
  BufferCounts now_, most_;
};

class ColumnWalk {
 public:
  ColumnWalk(const Graph& graph, const Plan& plan, const Schedule& schedule, int rank,
             const std::vector<StageMemory>& stages, bool repeats_a_microbatch)
      : graph_(graph),
        plan_(plan),
        schedule_(schedule),
        rank_(rank),
        stages_(stages),
        repeats_a_microbatch_(repeats_a_microbatch),
        activations_(by_edge(plan.activations)),
        gradients_(by_edge(plan.gradients)) {}

  RankMemory run() {
    const std::vector<Action>& column = schedule_.columns[static_cast<size_t>(rank_)];
    for (const Action& action : column) {
      if (action.kind != ActionKind::kBackward) continue;
      ++backwards_left_[action.stage];
      has_backward_.insert(action.stage);
    }
    for (const Action& action : column) {
      ahead_.post(column, [this](const Action& receive) { post(receive); });
      perform(action);
    }
    memory_.buffers = arrivals_.most();
    add_sends(column);
    return std::move(memory_);
  }

 private:
  void perform(const Action& action) {
    switch (action.kind) {
      case ActionKind::kForward:
        forward(action);
        break;
      case ActionKind::kBackward:
        backward(action);
        break;
      case ActionKind::kWeightGradient:  // what its row says
      case ActionKind::kSendActivation:  // add_sends()
      case ActionKind::kSendGradient:
        break;
      case ActionKind::kReceiveActivation:
      case ActionKind::kReceiveGradient:
        ahead_.take(action);
    }
    if (holds(action.row().makes, Item::kWeightGradients) && made_gradients_.insert(action.stage).second) {
      add_gradients(action.stage);
    }
    if (action.row().frees == Item::kSaved) free_saved(action);
  }

  void post(const Action& receive) {
    const EdgeValues& values = receive.is_forward() ? activations_ : gradients_;
    for (ValueId id : values.at({receive.peer, receive.stage})) {
      arrivals_.take(buffer_bytes(graph_.values[id]));
      const int64_t slice = receive.is_forward() ? 0 : slice_of(receive.peer, id);
      if (slice > 0) arrivals_.take(slice + kAlignment);
    }
  }

  bool is_local(const Transfer& transfer) const { return plan_.rank_of(transfer.source) == plan_.rank_of(transfer.target); }

  /// Calls use(transfer) for what comes to `stage`, step inputs of rank 0 aside.
  template <class Use>
  void for_arrivals(const std::vector<Transfer>& transfers, int stage, const Use& use) const {
    for (const Transfer& transfer : transfers) {
      if (transfer.target != stage) continue;
      if (transfer.source == kInputStage && rank_ == 0) continue;
      use(transfer);
    }
  }

  void release(const Transfer& transfer, bool is_gradient) {
    const Value& value = graph_.values[transfer.value];
    if (is_local(transfer)) {
      now_ -= extent_bytes(value.spec);
      return;
    }
    arrivals_.give_back(buffer_bytes(value));
    const int64_t slice = is_gradient ? slice_of(transfer.source, transfer.value) : 0;
    if (slice > 0) arrivals_.give_back(slice + kAlignment);
  }

  int64_t slice_of(int source, ValueId id) {
    const auto [known, is_new] = slices_.try_emplace({source, id}, 0);
    if (is_new) known->second = slice_bytes(graph_, plan_, source, id);
    return known->second;
  }

  /// What stays here for a later stage of this rank.
  void hold_local(const std::vector<Transfer>& transfers, int stage) {
    for (const Transfer& transfer : transfers) {
      if (transfer.source == stage && is_local(transfer)) {
        now_ += extent_bytes(graph_.values[transfer.value].spec);
      }
    }
  }

  void note(int64_t bytes) { memory_.peak = std::max(memory_.peak, bytes + memory_.under_way); }

  bool is_compared(const Action& action) const {
    return repeats_a_microbatch_ && action.microbatch + 1 == schedule_.num_microbatches;
  }

  /// Under autograd, its gradients dropped, and the forward from the tape, for which all that the
  /// first has written is put back.
  void run_twice(const StageMemory& stage, int64_t others) {
    note(others + std::max(stage.later_backward, stage.forward + stage.written));
    now_ -= stage.written;
  }

  void forward(const Action& action) {
    const StageMemory& stage = stages_[static_cast<size_t>(action.stage)];
    const bool is_repeated = is_compared(action) && has_backward_.contains(action.stage);
    if (is_compared(action)) now_ += stage.written;
    note(now_ + stage.forward);
    if (is_compared(action) && !is_repeated) run_twice(stage, now_ + stage.outputs);
    now_ += stage.saved + stage.results;
    memory_.results += stage.results;
    hold_local(plan_.activations, action.stage);
    for_arrivals(plan_.activations, action.stage, [&](const Transfer& transfer) {
      const bool stays = stage.saved_arrivals.contains(transfer.value) || stage.returned_arrivals.contains(transfer.value);
      if (!stays && !is_repeated) release(transfer, false);
    });
    note(now_);
  }

  void backward(const Action& action) {
    const StageMemory& stage = stages_[static_cast<size_t>(action.stage)];
    const bool is_first = had_backward_.insert(action.stage).second;
    if (is_compared(action)) run_twice(stage, now_ - stage.saved);
    const int64_t others = now_ - stage.saved;
    if (--backwards_left_[action.stage] == 0) {
      note(others + (is_first ? stage.only_backward : stage.last_backward));
      memory_.under_way = stage.under_way;
      memory_.arriving = stage.arriving;
    } else {
      note(others + (is_first ? stage.first_backward : stage.later_backward));
    }
    hold_local(plan_.gradients, action.stage);
    for_arrivals(plan_.gradients, action.stage, [&](const Transfer& transfer) { release(transfer, true); });
  }

  void free_saved(const Action& action) {
    const StageMemory& stage = stages_[static_cast<size_t>(action.stage)];
    now_ -= stage.saved;
    for_arrivals(plan_.activations, action.stage, [&](const Transfer& transfer) {
      const bool was_saved = stage.saved_arrivals.contains(transfer.value) || is_compared(action);
      if (was_saved && !stage.returned_arrivals.contains(transfer.value)) release(transfer, false);
    });
    note(now_);
  }

  void add_gradients(int stage) {
    for (ValueId id : plan_.stages[stage].parameters) {
      if (!has_gradient_.insert(id).second) continue;
      const int64_t bytes = parameter_bytes(graph_.values[id], 0).gradient;
      memory_.gradients += bytes;
      now_ += bytes;
    }
  }

  void add_sends(const std::vector<Action>& column) {
    std::set<std::tuple<ActionKind, int, int>> seen;
    const int64_t all = schedule_.num_microbatches;
    for (const Action& action : column) {
      if (!action.is_send() || !seen.emplace(action.kind, action.stage, action.peer).second) continue;
      const bool is_activation = action.is_forward();
      const EdgeValues& values = is_activation ? activations_ : gradients_;
      const int64_t limit = schedule_.limits_sends ? schedule_.send_limit(action) : all;
      for (ValueId id : values.at({action.stage, action.peer})) {
        const int64_t slice = is_activation ? 0 : slice_of(action.stage, id);
        const int64_t bytes = slice > 0 ? kMessageOverheadBytes + slice : buffer_bytes(graph_.values[id]);
        memory_.buffers[bytes] += std::min(all, limit);
      }
    }
  }

  const Graph& graph_;
  const Plan& plan_;
  const Schedule& schedule_;
  const int rank_;
  const std::vector<StageMemory>& stages_;
  const bool repeats_a_microbatch_;
  const EdgeValues activations_, gradients_;
  ReceivesAhead ahead_;
  int64_t now_ = 0;
  BufferMeter arrivals_;
  std::map<std::pair<int, ValueId>, int64_t> slices_;  // by source stage and value
  std::set<int> had_backward_, made_gradients_;        // stages
  std::set<int> has_backward_;
  std::map<int, int> backwards_left_;  // by stage
  std::set<ValueId> has_gradient_;
  RankMemory memory_;
};

}  // namespace

int64_t RankMemory::buffer_bytes() const {
  int64_t bytes = 0;
  for (const auto& [capacity, count] : buffers) bytes += capacity * count;
  return bytes;
}

RankMemory rank_memory(const Graph& graph, const Plan& plan, const Schedule& schedule, int rank,
                       const std::vector<StageMemory>& stages, bool repeats_a_microbatch) {
  return ColumnWalk(graph, plan, schedule, rank, stages, repeats_a_microbatch).run();
}

BufferCounts message_buffers(const Graph& graph, const Plan& plan, const Schedule& schedule, int rank,
                             bool repeats_a_microbatch) {
  std::vector<StageMemory> stages(plan.stages.size());
  std::set<int> receivers;
  for (const Transfer& transfer : plan.activations) {
    if (transfer.source != kInputStage || rank != 0) receivers.insert(transfer.target);  // rank 0 has the step's inputs
  }
  const GradientFlow flow(graph);
  for (int s : receivers) {
    if (plan.stages[s].rank == rank) stages[s] = stage_memory(graph, flow, plan, s);
  }
  return rank_memory(graph, plan, schedule, rank, stages, repeats_a_microbatch).buffers;
}

int64_t buffer_bytes(const Value& value) {
  return kMessageOverheadBytes + std::max(extent_bytes(value.spec), value.spec.num_bytes());
}

}  // namespace smp::partitioner
