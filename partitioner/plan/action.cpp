// Text form and hash of an action.
#include "partitioner/plan/action.h"

namespace smp::partitioner {
namespace {

constexpr bool rows_are_in_order() {
  for (size_t i = 0; i < kActionRows.size(); ++i) {
    const bool is_computation = kActionRows[i].role == ActionRow::Role::kCompute;
    if (kActionRows[i].kind != static_cast<ActionKind>(i) || is_computation != (i < kNumComputations)) return false;
  }
  return true;
}
static_assert(rows_are_in_order());

std::string stage_name(int stage) { return stage == kInputStage ? "in" : std::to_string(stage); }

}  // namespace

size_t ActionHash::operator()(const Action& action) const {
  // Distinct below 2^20 stages and 2^21 microbatches; multiplied by 2^64 / golden ratio to spread.
  size_t key = static_cast<size_t>(action.kind);
  key = key << 21 ^ static_cast<size_t>(action.microbatch);
  key = key << 20 ^ static_cast<size_t>(action.stage + 1);
  key = key << 20 ^ static_cast<size_t>(action.peer + 1);
  return (key ^ key >> 32) * 0x9E3779B97F4A7C15u;
}

std::string to_string(const Action& action) {
  const std::string stage = stage_name(action.stage), work = action.row().letter + std::to_string(action.microbatch);
  if (action.is_send()) return stage + work + ">" + stage_name(action.peer);
  if (action.is_receive()) return stage + "<" + stage_name(action.peer) + work;
  return stage + work;
}

}  // namespace smp::partitioner
