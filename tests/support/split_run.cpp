// Zoo models through smp.
#include "tests/support/split_run.h"

#include <torch/torch.h>

#include "smp/detail/model_state.h"
#include "smp/smp.h"

namespace smp::support {
namespace {

constexpr uint64_t kModelSeed = 7, kDataSeed = 11;

std::vector<StepOutput> call(const ZooModel& model, DistributedModel<torch::nn::Module>& distributed,
                             torch::nn::Module& module, const SplitOptions& options) {
  auto step = smp::step([&](const std::vector<at::Tensor>& microbatch) {
    const BodyResult result = model.body(module, microbatch);
    distributed.backward(result.loss);
    for (const at::Tensor& loss : result.more_losses) distributed.backward(loss);
    std::vector<at::Tensor> returned{result.loss};
    returned.insert(returned.end(), result.outputs.begin(), result.outputs.end());
    return returned;
  });
  std::vector<StepOutput> outputs;
  for (int s = 0; s < options.steps; ++s) {
    std::vector<at::Tensor> inputs = model.make_inputs(options.batch, kDataSeed + static_cast<uint64_t>(s));
    for (at::Tensor& input : inputs) input = input.chunk(dp_size())[dp_rank()].clone();
    outputs = step(inputs);
  }
  return outputs;
}

}  // namespace

OracleResult run_split(const ZooModel& model, const SplitOptions& options) {
  const auto module = model.make(kModelSeed);
  options.place(*module);
  DistributedModel<torch::nn::Module> distributed(module, options.model);
  if (options.bucket_bytes > 0) detail::ModelAccess::of(distributed).reduction.bucket_bytes = options.bucket_bytes;
  const std::vector<StepOutput> outputs = call(model, distributed, *module, options);
  options.look();
  OracleResult result;
  for (int64_t m = 0; m < outputs.at(0).size(); ++m) {
    result.losses.push_back(outputs[0][m]);
    auto& rest = result.outputs.emplace_back();
    for (size_t i = 1; i < outputs.size(); ++i) rest.push_back(outputs[i][m]);
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

OracleResult run_unsplit(const ZooModel& model, int microbatches, const SplitOptions& options) {
  const auto module = model.make(kModelSeed);
  OracleResult result;
  for (int s = 0; s < options.steps; ++s) {
    const auto step = static_cast<uint64_t>(s);
    result = run_oracle(model, *module, model.make_inputs(options.batch, kDataSeed + step), microbatches,
                        {.base_seed = kSplitBaseSeed, .step = step}, /*training=*/true);
  }
  return result;
}

double gradient_tolerance(const ZooModel& model, int stages) {
  return model.has_tied_weights && stages > 1 ? 1e-6 : 0.0;
}

}  // namespace smp::support
