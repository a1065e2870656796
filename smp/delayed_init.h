// Models that are larger than the memory of one rank: constructed everywhere, initialised where their parts live.
#pragma once

#include <memory>

namespace torch::nn {
class Module;
}

namespace smp {

/// While it lives, this thread constructs modules without the values of their parameters and
/// buffers (SageMaker's delay_param_initialization).
///
///   torch::manual_seed(1);
///   std::shared_ptr<Net> net;
///   {
///     smp::DelayParamInitialization delay;
///     net = std::make_shared<Net>();             // sizes, no memory
///     torch::nn::init::xavier_uniform_(net->head->weight);
///   }
///   smp::DistributedModel model(net);            // its first step makes each rank's values
///
/// The rule: initialise inside the scope. Operators are recorded there and done in the first step that uses the model, each
/// rank for its own tensors; the values are those that construction without the scope would have given, bit for bit, and so
/// are the random numbers that the program draws afterwards. Reading a value before throws an error that tells the way out.
/// Refused with c10::NotImplementedError: operators whose sizes depend on values, resize_(), autocast.
class DelayParamInitialization {
 public:
  /// Does nothing if not `enabled`, and inside of another scope. Throws c10::ValueError inside a
  /// step body; a step throws it inside the scope.
  explicit DelayParamInitialization(bool enabled = true);
  ~DelayParamInitialization();
  DelayParamInitialization(const DelayParamInitialization&) = delete;
  DelayParamInitialization& operator=(const DelayParamInitialization&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Gives all parameters and buffers of the module their values on this rank at once: for a module that no step uses. Does
/// nothing for those that have them. Throws c10::ValueError inside a step body.
void initialize_parameters(const torch::nn::Module& module);

}  // namespace smp
