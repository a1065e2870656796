// All actions of a step, out of the table of actions and the edges of the stage graphs.
#include "partitioner/schedule/dependencies.h"

namespace smp::partitioner {
namespace {

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

}  // namespace

std::vector<Action> demanded_actions(const MicrobatchGraphs& graphs) {
  std::vector<Action> demanded;
  for (int m = 0; m < graphs.num_microbatches(); ++m) {
    for (int stage = 0; stage < graphs.num_stages(m); ++stage) {
      for (size_t i = 0; i < (graphs.has_backward(stage, m) ? kNumComputations : 1); ++i) {
        const Action computation{kActionRows[i].kind, stage, m};
        demanded.push_back(computation);
        for_each_dependency(computation, graphs, [&](const Action& needed) {
          if (!needed.is_receive()) return;
          demanded.push_back(needed);
          demanded.push_back(counterpart(needed));
        });
      }
    }
  }
  return demanded;
}

}  // namespace smp::partitioner
