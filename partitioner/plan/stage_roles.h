// Which values of a stage must outlive the operators that make and read them.
#pragma once

#include <set>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// Values of one stage by role.
struct StageRoles {
  std::set<ValueId> received;  // from other stages; step inputs that rank 0 holds anyway are not
  std::set<ValueId> kept;      // until the forward has ended: read elsewhere
  std::set<ValueId> results;   // returned: until the step ends
  std::set<ValueId> roots;     // kept until the backward, which starts there
};

/// Expects the activations and gradients of `plan` to be filled in.
StageRoles stage_roles(const Graph& graph, const Plan& plan, int stage);

}  // namespace smp::partitioner
