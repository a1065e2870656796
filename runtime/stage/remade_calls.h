// Activation checkpointing on a tape: what its backward computes again.
#pragma once

#include "runtime/stage/flat_call.h"
#include "runtime/stage/tape_lists.h"

namespace smp::runtime {

/// Puts copies of the forward's calls into the backward, just before what they make is needed, so that it dies in the
/// forward. What the forward finds, what leaves the tape, and what cannot be computed a second time stays: random numbers
/// are drawn again under their seed, but what an operator writes to a parameter or buffer is written once, and memory that
/// is written to after it was read is not there any more. `fixed`: tensors that calls have as arguments, by slot. What
/// operators of the graph make that `recomputation` keeps stays too.
void remake(TapeLists& lists, const Slots& fixed, const partitioner::Recomputation& recomputation);

}  // namespace smp::runtime
