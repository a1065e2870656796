// Microbatches of one step that take different paths, one of which writes to what the backward of another needs.
#pragma once

#include <string>
#include <vector>

#include "smp/engine/models/program.h"

namespace smp::engine {

/// What to say of a parameter or buffer that a later microbatch writes to although the backward of an earlier one may need
/// it as it was; empty: there is none. Microbatches of programs that write to it themselves keep a copy.
std::string write_conflict(const std::vector<Program*>& microbatches);

}  // namespace smp::engine
