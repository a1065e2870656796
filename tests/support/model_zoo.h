// Models as users write them, each with inputs and a loss: what splitting is compared on. Knows nothing of smp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace smp::support {

/// What a step body makes of one microbatch.
struct BodyResult {
  at::Tensor loss;                        // scalar
  std::vector<at::Tensor> outputs;        // further values that the body returns; some are integers
  std::vector<at::Tensor> more_losses{};  // scalars with a backward of their own, after that of `loss`
};

/// One unmodified torch::nn::Module with everything that a training step on it needs. The batch dimension is 0 in every step
/// argument, and any multiple of 40 fits 1, 2, 5 and 8 microbatches.
struct ZooModel {
  std::string name;
  /// A new module. Equal seeds give equal bits; safe while other threads run random operators under
  /// GeneratorHold, and leaves the user's random state as it was.
  std::function<std::shared_ptr<torch::nn::Module>(uint64_t seed)> make;
  /// Step arguments (inputs, then targets), contiguous, from a generator of their own.
  std::function<std::vector<at::Tensor>(int64_t batch, uint64_t seed)> make_inputs;
  /// Calls the module's own forward on one microbatch of the step arguments.
  std::function<std::vector<at::Tensor>(torch::nn::Module&, const std::vector<at::Tensor>&)> forward;
  /// The rest of the body: losses over the model's outputs and the same microbatch.
  std::function<BodyResult(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>&)> loss;

  bool has_random = false;  // draws random numbers in training mode
  /// Some parameter is used at more than one place, by one module called twice or by two modules.
  bool has_tied_weights = false;
  /// The loss is a mean over rows that do not see each other: no batch statistics, no contrast within the batch.
  bool rows_are_independent = true;
  /// Parameters that the loss does not reach, by qualified name.
  std::vector<std::string> without_gradient = {};

  /// Forward and loss; backward is up to the caller.
  BodyResult body(torch::nn::Module& module, const std::vector<at::Tensor>& microbatch) const {
    return loss(forward(module, microbatch), microbatch);
  }
};

/// All models, one training microbatch of 5 rows each within a few milliseconds on one thread.
const std::vector<ZooModel>& model_zoo();

/// The model of that name. Throws c10::ValueError listing the names otherwise.
const ZooModel& zoo_model(const std::string& name);

/// GoogleTest prints a model by its name.
inline void PrintTo(const ZooModel& model, std::ostream* out) { *out << model.name; }

}  // namespace smp::support
