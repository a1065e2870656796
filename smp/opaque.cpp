// Forwards to the operator behind opaque regions.
#include "smp/opaque.h"

#include "runtime/capture/opaque.h"

namespace smp::opaque_internal {

bool register_function(const char* name, Function function) { return runtime::register_opaque(name, function); }

Tensors call(const char* name, const Tensors& inputs) { return runtime::call_opaque(name, inputs); }

}  // namespace smp::opaque_internal
