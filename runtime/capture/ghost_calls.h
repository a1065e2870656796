// Runs operators whose tensors are ghosts: on what stands for them. Owns neither ghosts nor stand-ins.
#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/capture/bindings.h"
#include "runtime/capture/identities.h"
#include "runtime/capture/interceptor.h"

namespace smp::runtime {

/// The tensors of a call are ghosts and the real tensors that a body brings along, and so are its results. Under autocast
/// composites are taken apart on them: they say that they are on the rank's device, so that LibTorch's own kernels cast the
/// parts as they cast those of the real run.
class GhostCalls : public Interceptor {
 public:
  GhostCalls(Identities& tensors, const Bindings& bindings) : tensors_(tensors), bindings_(bindings) {}

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;

 private:
  void take_apart(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack& stack);
  bool comes_to_device(const at::Tensor& seen) const;
  bool stays_on_host(const at::Tensor& seen) const;
  void call_on_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  Identities& tensors_;
  const Bindings& bindings_;
};

}  // namespace smp::runtime
