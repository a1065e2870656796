// Which ranks add to the gradient of a parameter that several may read.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Parameter name -> pipeline ranks whose operators add to its gradient, ascending. One that a rank only reads, for its
/// value or without a gradient, is not trained there, nor one whose gradient `plan` relays to another rank. A superset, as
/// GradientFlow is.
std::map<std::string, std::vector<int>> trained_on(const Graph& graph, const Plan& plan);

}  // namespace smp::partitioner
