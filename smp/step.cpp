// The type-erased entry of step functions.
#include "smp/step.h"

#include "smp/detail/conductor.h"

namespace smp::step_internal {

int register_step() {
  // A step object may be made before init; it is numbered on its first call then, in the order of calls.
  auto* own = detail::try_context();
  return own == nullptr ? -1 : own->num_steps++;
}

std::vector<StepOutput> run(int step_number, const Tensors& arguments, const Body& body) {
  return detail::conductor("step").run_step(step_number, arguments, body);
}

}  // namespace smp::step_internal
