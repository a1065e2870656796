// Opaque functions as a language gives them: a table of callables by number. Every rank fills its own before steps run, and
// a graph names a function by its number.
#pragma once

#include "runtime/capture/opaque.h"

namespace smp::engine {

using runtime::add_opaque;
using runtime::call_opaque;
using runtime::opaque_stand_ins;
using runtime::OpaqueFunction;
using runtime::set_interpreter;

}  // namespace smp::engine
