// A model of the engine as an object of Python: what the engine gives out is opaque, and a class needs a type that can
// be seen.
#pragma once

#include <memory>

#include "smp/engine/engine.h"

namespace smp::python {

struct ModelHandle {
  std::shared_ptr<engine::Model> model;
};

}  // namespace smp::python
