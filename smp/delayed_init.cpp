// The scope and its way out.
#include "smp/delayed_init.h"

#include <torch/nn/module.h>

#include "runtime/delayed/construction.h"
#include "runtime/delayed/unmade.h"
#include "runtime/device/random.h"
#include "smp/engine/context.h"

namespace smp {

struct DelayParamInitialization::State {
  runtime::ConstructionScope scope;
};

DelayParamInitialization::DelayParamInitialization(bool enabled) {
  engine::refuse_in_body("DelayParamInitialization", "Construct modules before the step.");
  if (enabled) state_ = std::make_unique<State>();
}

DelayParamInitialization::~DelayParamInitialization() = default;

void initialize_parameters(const torch::nn::Module& module) {
  engine::refuse_in_body("initialize_parameters");
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  const runtime::GeneratorHold hold;
  runtime::make_values(tensors);
}

}  // namespace smp
