// Plans as text, to send from the leader and to save.
#pragma once

#include <string>
#include <string_view>

#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Exact: doubles travel as 16 hex digits of their bits, as in graph_io.h.
std::string serialise(const Plan& plan);

/// The inverse of `serialise`. Throws c10::ValueError with the place in the text for anything that
/// it did not write. Whether the plan fits a graph is check()'s question (check_plan.h).
Plan deserialise_plan(std::string_view text);

}  // namespace smp::partitioner
