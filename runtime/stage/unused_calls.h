// Calls that a tape has been recorded with and can do without.
#pragma once

#include "runtime/stage/tape_lists.h"

namespace smp::runtime {

/// Folds views into what reads them. `fixed`: by slot, receives the fixed tensors and their views.
void fold_views(TapeLists& lists, Slots& fixed);

/// Drops what nobody uses and cannot throw, views above all.
void drop_unused(TapeLists& lists);

}  // namespace smp::runtime
