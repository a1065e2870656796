// Plans as text, to send from the leader and to save.
#pragma once

#include <string>
#include <string_view>

#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Exact: doubles travel as 16 hex digits of their bits, as in graph_io.h.
std::string serialise(const Plan& plan);

/// The inverse of `serialise`; what derive() makes of `graph` does not travel. Throws c10::ValueError with the place in the
/// text for anything that `serialise` did not write, and for a plan of other operators. Whether these may be where the plan
/// has them is check()'s question (check_plan.h).
Plan deserialise_plan(std::string_view text, const Graph& graph);

}  // namespace smp::partitioner
