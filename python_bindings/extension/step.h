// A step of Python, as a call of the engine.
#pragma once

#include "python_bindings/extension/interpreter.h"

namespace smp::python {

/// The class StepNumber and the function run_step.
void bind_step(py::module_& module);

}  // namespace smp::python
