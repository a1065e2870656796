// Looks on while one microbatch passes through a stage under autograd.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

#include "partitioner/graph/graph.h"

namespace smp::runtime {

class StageWatcher {
 public:
  virtual ~StageWatcher() = default;
  /// A tensor that the operators will read, as they will see it: an input, or one of this rank's own.
  virtual void entered(partitioner::ValueId, const at::Tensor&) {}
  /// Runs one operator of the forward. random_ordinal: -1 where it draws nothing.
  virtual void call_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack, partitioner::NodeId,
                             int32_t /*random_ordinal*/) {
    op.callBoxed(stack);
  }
  /// Runs autograd's engine.
  virtual void run_backward(const std::function<void()>& engine) { engine(); }
  /// The gradient of a parameter in one backward, whole. Returns whether to add it to its .grad.
  virtual bool gradient_made(partitioner::ValueId parameter, const at::Tensor& gradient) = 0;
};

}  // namespace smp::runtime
