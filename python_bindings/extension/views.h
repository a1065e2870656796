// Models and optimizers of Python as the engine sees them: objects with the methods of ModelView and OptimizerView
// (smdistributed/modelparallel/torch/views.py).
#pragma once

#include <memory>

#include "python_bindings/extension/interpreter.h"
#include "smp/engine/model_view.h"
#include "smp/engine/optimizer_view.h"

namespace smp::python {

std::shared_ptr<const engine::ModelView> model_view(py::object view);
std::unique_ptr<engine::OptimizerView> optimizer_view(py::object view);

}  // namespace smp::python
