// Calls of a tape that give the same in every microbatch.
#pragma once

#include "runtime/stage/tape_lists.h"

namespace smp::runtime {

/// Runs calls of the forward that depend on nothing but numbers, as they make a causal mask, and takes them off the lists.
/// `fixed`: by slot, receives what they made. Those that draw or write, and all on memory that anybody writes to, stay. What
/// leaves the stage may be among what they made: other stages do not write to it, and users are handed copies.
/// `takes_host_tensors`: constants on the host count as numbers where a stage computes elsewhere, so that they are not
/// brought there in each microbatch; the tape is then for the tensors of which TapeOwn::is_folded says so.
void fold_constants(TapeLists& lists, Slots& fixed, bool takes_host_tensors);

}  // namespace smp::runtime
