// cost=measured: times of the operators that a plan is made from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "smp/engine/planning/auto_layout.h"
#include "smp/step_call.h"

namespace smp::engine {

struct RankState;

/// What the other ranks are to measure with world rank 0.
struct Wanted {
  std::vector<GraphToPlan> graphs;  // without inputs
  std::vector<int64_t> averaged{};  // elements of gradients
};
std::string encode_wanted(const std::vector<GraphToPlan>& graphs, const std::vector<int64_t>& averaged);
/// Throws std::runtime_error for bytes that are none, c10::ValueError for graphs that are none.
Wanted decode_wanted(std::string_view bytes);

/// Before a step function's first step, as long as some model is not placed: world rank 0 captures the body for what would
/// be planned, and all ranks run and time those operators at once, as they will in training. All ranks end up with the
/// times of rank 0. Nothing is run whose times are known from an earlier job on this kind of machine. A body that throws is
/// left to the step itself. Collective over the world; does nothing under cost=predicted, and in the loop of smp::join.
void measure_costs(RankState& rank, int step_number, const step_internal::Call& call);

}  // namespace smp::engine
