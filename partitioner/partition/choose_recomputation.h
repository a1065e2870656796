// What runs again so that a plan stays within its memory limits.
#pragma once

#include <optional>

#include "partitioner/partition/build_plan.h"

namespace smp::partitioner {

/// `plan`, which is over the limits of `input`'s request, with recomputation on the ranks that are; nothing where even all
/// of it is not enough.
///
/// Each stage of such a rank is cut into pieces where little crosses, as for rotor's chains (Beaumont et al., Optimal
/// checkpointing for heterogeneous chains, 2020); of all pieces nothing is kept at first. Then results stay in the order of
/// the time that a byte of them saves, as long as the predicted peak, at each position of the schedule, allows it, and last
/// the others that still fit. Of several numbers of pieces the one with the shortest step.
std::optional<Plan> within_limits_by_recomputation(const PlanInput& input, const Plan& plan);

/// How many bytes too low the limits of `input`'s request are for `plan` when nothing of those ranks is kept.
int64_t excess_with_recomputation(const PlanInput& input, const Plan& plan);

/// The marked regions of `input`, and all else in about so many pieces, of which nothing is kept.
Recomputation in_pieces(const PlanInput& input, int pieces);

/// `plan`, which is within the limits, with as much kept of its recomputation as they allow, but for what the body marks.
Plan with_as_much_kept(const PlanInput& input, Plan plan);

}  // namespace smp::partitioner
