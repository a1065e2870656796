// A call of a step function without its types: what a language hands over for one step, and what it gets back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "smp/step_output.h"

namespace smp::step_internal {

using Tensors = std::vector<at::Tensor>;

/// The microbatches that a leader wants of a batch: its own, of those of all replicas that share the batch, in their order.
struct Share {
  int64_t microbatches = 1;  // of one replica
  int64_t replica = 0;
  int64_t replicas = 1;  // that share the batch
  int64_t total() const { return microbatches * replicas; }
  int64_t first() const { return microbatches * replica; }
};

/// A tensor of a step argument and how it is cut.
struct StepTensor {
  at::Tensor tensor{};
  int64_t position = 0;   // of the argument
  int64_t axis = 0;       // along which it is cut
  bool is_whole = false;  // every microbatch gets all of it
  Tensors pieces{};       // by microbatch, where the argument has cut itself
};

/// What one rank hands over for a step. `arguments`, `values` and `payload` are asked on leaders only, pp_rank() 0.
struct Call {
  /// The tensors of the arguments; the last call's share is what bodies get.
  std::function<std::vector<StepTensor>(const Share& share)> arguments;
  /// The body: these tensors for one microbatch in, returned tensors out.
  std::function<Tensors(const Tensors& inputs, int64_t microbatch)> body;
  /// Whether the bodies of this step get something that differs beside their tensors. Empty: nothing does.
  std::function<bool()> differ{};
  /// What the bodies of this step returned beside tensors, by microbatch: travels with every step. Empty: nothing.
  std::function<std::vector<std::string>()> values{};
  /// How what the bodies returned is put together from tensors and values, the same for all microbatches: travels with the
  /// program that the step runs, and again only when it changes. Empty: nothing.
  std::function<std::string()> payload{};
  /// Whether tensor.cpu() in the body is a read, as in C++, where pointers may follow. Else the body asks for what it looks
  /// at (engine::look_at), and cpu() is what to() is: on the CPU the tensor itself.
  bool cpu_is_read = true;
};

/// What a step brings to every rank: outputs by returned tensor, and the leader's values and payload.
struct Results {
  std::vector<StepOutput> tensors;
  std::vector<std::string> values;  // by microbatch
  std::string payload;
  size_t num_microbatches = 0;
};

/// The number of a step object and its copies on this rank: the same on all ranks that make the same objects in the same
/// order. Made before smp::init, it gets its number in the first call. What a rank keeps for a step goes with its objects.
class StepNumber {
 public:
  StepNumber();
  int get();

 private:
  struct Registration;
  std::shared_ptr<Registration> registration_;
};

}  // namespace smp::step_internal
