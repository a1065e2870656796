// Other ends, followers and all actions of a step, out of the table of actions, and proofs about that table.
#include "partitioner/schedule/dependencies.h"

#include <c10/util/Exception.h>

namespace smp::partitioner {
namespace {

using Role = ActionRow::Role;

constexpr bool every_item_has_one_maker() {
  for (const ActionRow& reader : kActionRows) {
    for (const Item item : reader.reads) {
      int num_makers = 0;
      for (const ActionRow& row : kActionRows) num_makers += holds(row.makes, item) ? 1 : 0;
      if (item != Item::kNone && num_makers != 1) return false;
    }
  }
  return true;
}
static_assert(every_item_has_one_maker());

constexpr bool are_ends(const ActionRow& one, const ActionRow& other) {
  const ActionRow& send = one.role == Role::kSend ? one : other;
  const ActionRow& receive = one.role == Role::kSend ? other : one;
  return send.role == Role::kSend && receive.role == Role::kReceive && send.reads[0] == made_elsewhere_for(receive.makes[0]);
}

constexpr bool every_transfer_has_one_other_end() {
  for (const ActionRow& one : kActionRows) {
    int num_ends = 0;
    for (const ActionRow& other : kActionRows) num_ends += are_ends(one, other) ? 1 : 0;
    if (num_ends != (one.role == Role::kCompute ? 0 : 1)) return false;
  }
  return true;
}
static_assert(every_transfer_has_one_other_end());

}  // namespace

Action counterpart(const Action& transfer) {
  for (const ActionRow& row : kActionRows) {
    if (are_ends(transfer.row(), row)) return {row.kind, transfer.peer, transfer.microbatch, transfer.stage};
  }
  TORCH_INTERNAL_ASSERT(false, to_string(transfer), " has no other end");
}

bool follows_at_once(const Action& computation, const Action& made) {
  const auto& reads = computation.row().reads;
  const auto& makes = made.row().makes;
  return computation.is_compute() && computation.stage == made.stage && computation.microbatch == made.microbatch &&
         holds(makes, reads[0]) && (reads[1] == Item::kNone || holds(makes, reads[1]));
}

void append_with_followers(const Action& computation, std::vector<Action>& column) {
  column.push_back(computation);
  for (const ActionRow& row : kActionRows) {
    const Action next{row.kind, computation.stage, computation.microbatch};
    if (follows_at_once(next, computation)) append_with_followers(next, column);
  }
}

std::vector<Action> demanded_computations(const MicrobatchGraphs& graphs) {
  std::vector<Action> demanded;
  for (int m = 0; m < graphs.num_microbatches(); ++m) {
    for (int stage = 0; stage < graphs.num_stages(m); ++stage) {
      for (const ActionRow& row : kActionRows) {
        const bool is_demanded = row.role == Role::kCompute && (row.is_forward || graphs.has_backward(stage, m));
        if (is_demanded) demanded.push_back({row.kind, stage, m});
      }
    }
  }
  return demanded;
}

std::vector<Action> demanded_actions(const MicrobatchGraphs& graphs) {
  std::vector<Action> demanded;
  for (const Action& computation : demanded_computations(graphs)) {
    demanded.push_back(computation);
    for_each_dependency(computation, graphs, [&](const Action& needed) {
      if (!needed.is_receive()) return;
      demanded.push_back(needed);
      demanded.push_back(send_of(needed));
    });
  }
  return demanded;
}

}  // namespace smp::partitioner
