// The parts of a body whose operators run again in the backward: a mode of the thread, like autocast, and modules that are
// marked.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "runtime/capture/recording.h"

namespace smp::runtime {

/// What is called between the two is a region. One within another is part of that: the outermost one's inputs are all that
/// is kept. `group` other than 0: part of the region before, if that has the same group and this does not begin it.
void enter_recompute_region(int64_t group = 0, bool begins = true);
void leave_recompute_region() noexcept;

/// Regions of a body are numbered as they are entered. -1: outside of all.
int32_t current_recompute_region();

/// A body begins: the next region is number 0, and what is open outside of it does not count.
void begin_recompute_regions();

/// A module by its parameters. In each body, from the first operator that reads one of them to the last is a region, and a
/// new one begins where the module is called again. For languages whose modules cannot be hooked.
void mark_for_recomputation(const std::vector<at::Tensor>& parameters);

/// Gives operators of marked modules a region, unless they have one.
void add_marked_regions(Recording& recording);

}  // namespace smp::runtime
