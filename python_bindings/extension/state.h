// State of models in dictionaries, and with that of optimizers in files of C++, for the module _engine.
#pragma once

#include "python_bindings/extension/interpreter.h"

namespace smp::python {

void bind_state(py::module_& module);

}  // namespace smp::python
