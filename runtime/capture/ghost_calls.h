// Runs operators whose tensors are ghosts: on what stands for them. Owns neither ghosts nor stand-ins.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

#include "runtime/capture/ghosts.h"
#include "runtime/capture/interceptor.h"

namespace smp::runtime {

/// The tensors of a call are ghosts and the real tensors that a body brings along, and so are its results. Under autocast
/// composites are taken apart on them: they say that they are on the rank's device, so that LibTorch's own kernels cast the
/// parts as they cast those of the real run.
class GhostCalls : public Interceptor {
 public:
  using Exchange = std::function<at::Tensor(const at::Tensor&)>;
  /// `stand_in_of`: the meta tensor for any tensor of a call. `ghost_of`: a ghost of `run` for the meta tensor of a result.
  /// `comes_to_device`: a real tensor that is on the host yet, and on the rank's device when the call is run.
  GhostCalls(const GhostRun& run, Exchange stand_in_of, Exchange ghost_of,
             std::function<bool(const at::Tensor&)> comes_to_device)
      : run_(run),
        stand_in_of_(std::move(stand_in_of)),
        ghost_of_(std::move(ghost_of)),
        comes_to_device_(std::move(comes_to_device)) {}

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;

 private:
  void take_apart(const c10::OperatorHandle& op, c10::DispatchKey key, torch::jit::Stack& stack);
  bool stays_on_host(const at::Tensor& seen) const;
  void call_on_stand_ins(const c10::OperatorHandle& op, torch::jit::Stack& stack);

  const GhostRun& run_;
  Exchange stand_in_of_, ghost_of_;
  std::function<bool(const at::Tensor&)> comes_to_device_;
};

}  // namespace smp::runtime
