// Functions of Python that run as one operator.
#pragma once

#include "python_bindings/extension/interpreter.h"

namespace smp::python {

/// The functions set_opaque and call_opaque.
void bind_opaque(py::module_& module);

}  // namespace smp::python
