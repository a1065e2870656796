// What depends on what: the one place that says what an action needs and what it makes possible, read off the table of
// actions. Generator, given tables, transfers, checker, walk (with it simulator and send limits) and idle times ask here.
// The executor does not: it performs the columns as they stand, and check() has proved that their order meets all that is
// here.
#pragma once

#include <vector>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/microbatch_graphs.h"

namespace smp::partitioner {

/// The one kind of action that makes `item`.
constexpr ActionKind maker_of(Item item) {
  for (const ActionRow& row : kActionRows) {
    if (holds(row.makes, item)) return row.kind;
  }
  return ActionKind::kForward;  // not reached: dependencies.cpp proves that each item has a maker
}

/// What the stages at the other end of an edge make for `wanted`; kNone: it is made on the stage itself.
constexpr Item made_elsewhere_for(Item wanted) {
  if (wanted == Item::kInputs) return Item::kOutputs;
  return wanted == Item::kOutputGradients ? Item::kInputGradients : Item::kNone;
}

/// The action at the other end of a transfer: the receive of a send, the send of a receive.
Action counterpart(const Action& transfer);

/// The send of a transfer, which its receive waits for.
inline Action send_of(const Action& transfer) { return transfer.is_send() ? transfer : counterpart(transfer); }

/// Calls visit(action) for each action that must have ended before `action` begins: those of its rank that make what it
/// reads (ActionRow::reads), and for a receive the send at the other end. Step inputs on rank 0 are there.
template <class Visit>
void for_each_dependency(const Action& action, const MicrobatchGraphs& graphs, const Visit& visit) {
  const int stage = action.stage, m = action.microbatch;
  if (action.is_receive()) return visit(send_of(action));
  if (stage == kInputStage) return;
  for (const Item item : action.row().reads) {
    if (item == Item::kNone) continue;
    const ActionRow& maker = row_of(maker_of(item));
    const Item elsewhere = made_elsewhere_for(item);
    if (elsewhere == Item::kNone) {
      visit(Action{maker.kind, stage, m});
      continue;
    }
    for (const int source : graphs.neighbours(m, maker.is_forward).sources[static_cast<size_t>(stage)]) {
      if (!graphs.is_local(stage, source, m)) {
        visit(Action{maker.kind, stage, m, source});
      } else if (source != kInputStage) {
        visit(Action{maker_of(elsewhere), source, m});
      }
    }
  }
}

/// The same of computations alone, on whatever rank: transfers are followed to what makes their values.
template <class Visit>
void for_each_computation_before(const Action& action, const MicrobatchGraphs& graphs, const Visit& visit) {
  for_each_dependency(action, graphs, [&](const Action& needed) {
    needed.is_compute() ? visit(needed) : for_each_computation_before(needed, graphs, visit);
  });
}

/// Calls visit(send) for each send of what `computation` makes, by kind and target.
template <class Visit>
void for_each_send_of(const Action& computation, const MicrobatchGraphs& graphs, const Visit& visit) {
  const int stage = computation.stage, m = computation.microbatch;
  for (const ActionRow& row : kActionRows) {
    if (row.role != ActionRow::Role::kSend || !holds(computation.row().makes, row.reads[0])) continue;
    for (const int target : graphs.neighbours(m, row.is_forward).targets[static_cast<size_t>(stage)]) {
      if (!graphs.is_local(stage, target, m)) visit(Action{row.kind, stage, m, target});
    }
  }
}

/// Whether `computation` reads what `made` makes on its stage, and nothing else.
bool follows_at_once(const Action& computation, const Action& made);

/// Appends `computation` and what follows it at once.
void append_with_followers(const Action& computation, std::vector<Action>& column);

/// All computations of the stage graphs, in microbatch and program order.
std::vector<Action> demanded_computations(const MicrobatchGraphs& graphs);

/// Everything that the stage graphs demand, each action once, each transfer behind its reader.
std::vector<Action> demanded_actions(const MicrobatchGraphs& graphs);

}  // namespace smp::partitioner
