// Memory for time: activations that are computed again.
#pragma once

namespace torch::nn {
class Module;
}

namespace smp {

/// In a step body: what is called while a guard lives runs again just before its backward, and until then keeps what enters
/// it alone. Losses and gradients keep every bit, dropout included. Guards nest as one.
///
///   torch::Tensor forward(torch::Tensor x) {
///     for (auto& layer : layers) {
///       smp::ActivationCheckpointingGuard again;
///       x = layer->forward(x);
///     }
///     return head(x);
///   }
class ActivationCheckpointingGuard {
 public:
  ActivationCheckpointingGuard();
  ~ActivationCheckpointingGuard();
  ActivationCheckpointingGuard(const ActivationCheckpointingGuard&) = delete;
  ActivationCheckpointingGuard& operator=(const ActivationCheckpointingGuard&) = delete;
};

/// The same for each call of `module`, as far as capture sees it: from the first operator that reads one of its parameters
/// to the last one. Before the first step; a copy of it (clone()) is not marked. Throws c10::ValueError inside a step body,
/// and for a module without parameters.
void set_activation_checkpointing(const torch::nn::Module& module);

}  // namespace smp
