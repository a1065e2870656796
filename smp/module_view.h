// torch::nn::Module as a model of the engine.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "smp/engine/model_view.h"

namespace torch::nn {
class Module;
}

namespace smp {

/// Keeps the module alive. Buffers of C++ modules are all persistent.
std::shared_ptr<const engine::ModelView> view_of(std::shared_ptr<const torch::nn::Module> module);

/// Parameters, then buffers, each once.
std::vector<at::Tensor> tensors_of(const torch::nn::Module& module);

}  // namespace smp
