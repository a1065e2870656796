// A model as the engine sees it, whatever language it is written in.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace smp::engine {

/// A parameter or buffer under one of its names.
struct ModelTensor {
  std::string name;  // qualified: "encoder.fc.weight"
  at::Tensor tensor;
  bool is_buffer = false;
  bool is_persistent = true;  // part of state dictionaries
};

/// Nothing is kept of what a view says about modes: it is asked anew in every step.
class ModelView {
 public:
  virtual ~ModelView() = default;
  /// Parameters, then buffers, under every name that they have, in the model's order. A tensor may come several times, a
  /// name once. Asked again when models come and go.
  virtual std::vector<ModelTensor> tensors() const = 0;
  /// Qualified names of the modules, "" for the model itself: where operators and refusals are said to be.
  virtual std::vector<std::string> module_paths() const = 0;
  /// Is the model in training mode? The mode of its leader counts, and is part of what a recording is valid for.
  virtual bool is_training() const = 0;
};

}  // namespace smp::engine
