// Operators that no tape holds, as far as a graph tells.
#pragma once

#include <string>
#include <string_view>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Whether its code is none of LibTorch's, and none that a tape knows.
bool is_foreign(std::string_view op);

/// Why no tape holds a call of this operator, by its name alone; empty where one may.
std::string why_untaped(std::string_view op, std::string_view overload);

/// The same of one call in a graph: of its arguments too.
std::string why_untaped(const Graph& graph, const Node& node);

}  // namespace smp::partitioner
