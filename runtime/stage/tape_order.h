// The order of a tape's last backward: what other stages wait for comes first.
#pragma once

#include "runtime/stage/tape_lists.h"

namespace smp::runtime {

/// Puts the calls on which the results of the last backward depend before as many of the others, gradients of parameters
/// above all, as may wait without a higher peak of memory than in the recorded order. Both keep their own order, and no two
/// calls that touch the same memory change places, so every bit stays. Convolutions are asked for the gradients of their
/// input and of their parameters one after the other.
///
/// Sets `results_end` of every backward. To be called when unused calls have been dropped. The idea of waiting weight
/// gradients: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024.
void put_results_first(TapeLists& lists);

}  // namespace smp::runtime
