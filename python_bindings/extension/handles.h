// Models and optimizers of the engine as objects of Python: what the engine gives out is opaque, and a class needs a type
// that can be seen.
#pragma once

#include <memory>

#include "smp/engine/engine.h"

namespace smp::python {

struct ModelHandle {
  std::shared_ptr<engine::Model> model;
};

struct OptimizerHandle {
  std::shared_ptr<engine::Optimizer> optimizer;
};

}  // namespace smp::python
