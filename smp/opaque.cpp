// C++ functions in the table of opaque ones. None needs an interpreter.
#include "smp/opaque.h"

#include "smp/engine/opaque_table.h"

namespace smp::opaque_internal {

int64_t register_function(const char* name, Function function) {
  return engine::add_opaque(name, {[function](const Tensors& inputs, const std::string&) { return function(inputs); }});
}

Tensors call(int64_t number, const Tensors& inputs) { return engine::call_opaque(number, inputs); }

}  // namespace smp::opaque_internal
