// What depends on what: the one place that says what an action needs. Read by generator, checker, transfers and reports.
#pragma once

#include <array>
#include <vector>

#include "partitioner/plan/action.h"
#include "partitioner/schedule/microbatch_graphs.h"

namespace smp::partitioner {

constexpr bool holds(const std::array<Item, 2>& items, Item item) { return items[0] == item || items[1] == item; }

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

/// Calls visit(action) for each action that must have ended before `action` begins: those of its rank that make what it
/// reads (ActionRow::reads), and for a receive the send at the other end. Step inputs on rank 0 are there.
template <class Visit>
void for_each_dependency(const Action& action, const MicrobatchGraphs& graphs, const Visit& visit) {
  const int stage = action.stage, m = action.microbatch;
  if (action.is_receive()) return visit(counterpart(action));
  if (stage == kInputStage) return;
  for (const Item item : action.row().reads) {
    if (item == Item::kNone) continue;
    const Item elsewhere = made_elsewhere_for(item);
    if (elsewhere == Item::kNone) {
      visit(Action{maker_of(item), stage, m});
      continue;
    }
    const Neighbours& neighbours = graphs.neighbours(m);
    const auto& sources = item == Item::kInputs ? neighbours.activation_sources : neighbours.gradient_sources;
    for (const int source : sources[static_cast<size_t>(stage)]) {
      if (!graphs.is_local(stage, source, m)) {
        visit(Action{maker_of(item), stage, m, source});
      } else if (source != kInputStage) {
        visit(Action{maker_of(elsewhere), source, m});
      }
    }
  }
}

/// Everything that the stage graphs demand, each action once, in microbatch and program order.
std::vector<Action> demanded_actions(const MicrobatchGraphs& graphs);

}  // namespace smp::partitioner
