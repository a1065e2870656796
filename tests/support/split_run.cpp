// Zoo models through smp.
#include "tests/support/split_run.h"

#include <torch/torch.h>

#include "smp/smp.h"

namespace smp::support {
namespace {

std::vector<StepOutput> call(const ZooModel& model, DistributedModel<torch::nn::Module>& distributed,
                             torch::nn::Module& module, const std::vector<at::Tensor>& batch) {
  auto body = [&](const std::vector<at::Tensor>& microbatch) {
    const BodyResult result = model.body(module, microbatch);
    if (module.is_training()) distributed.backward(result.loss);
    std::vector<at::Tensor> returned{result.loss};
    returned.insert(returned.end(), result.outputs.begin(), result.outputs.end());
    return returned;
  };
  return step_internal::run(0, batch, body);
}

}  // namespace

OracleResult run_split(const ZooModel& model, const std::shared_ptr<torch::nn::Module>& module,
                       const std::vector<at::Tensor>& full_batch, int num_steps) {
  DistributedModel<torch::nn::Module> distributed(module);
  OracleResult result;
  for (int s = 0; s < num_steps; ++s) {
    const std::vector<StepOutput> outputs = call(model, distributed, *module, full_batch);
    result.losses.clear();
    result.outputs.clear();
    for (int64_t m = 0; m < outputs.at(0).size(); ++m) {
      result.losses.push_back(outputs[0][m]);
      auto& rest = result.outputs.emplace_back();
      for (size_t i = 1; i < outputs.size(); ++i) rest.push_back(outputs[i][m]);
    }
  }
  for (const auto& [name, tensor] : distributed.local_named_parameters()) {
    result.gradients[name] = tensor.grad().defined() ? tensor.grad().clone() : at::Tensor();
  }
  const StateDict state = distributed.state_dict();
  for (const auto& entry : state.entries) {
    if (entry.is_buffer) result.buffers[entry.name] = entry.tensor;
  }
  return result;
}

}  // namespace smp::support
