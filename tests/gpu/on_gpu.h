// What programs of this folder have in common: they compute on a GPU, or end with an error.
#pragma once

#include "runtime/libtorch/deterministic.h"

namespace smp::tests {

using DeterministicAlgorithms = runtime::DeterministicScope;

}  // namespace smp::tests
