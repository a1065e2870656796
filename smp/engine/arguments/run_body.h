// The body of a step, run on ghosts: by the leader for the step, and by planning for its graph alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/body_capture.h"
#include "smp/engine/context/context.h"
#include "smp/step_call.h"

namespace smp::engine {

/// The gradients of all parameters. What bodies do to them would be done on this rank only, and before the backwards of the
/// other ranks, so it is undone.
class HeldGradients {
 public:
  explicit HeldGradients(const runtime::Bindings& bindings);
  ~HeldGradients() { put_back(); }
  HeldGradients(const HeldGradients&) = delete;
  HeldGradients& operator=(const HeldGradients&) = delete;
  /// Returns how many had changed.
  int64_t put_back();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  // by parameter
};

/// The body of microbatch `m`, captured. What it throws ends the capture.
runtime::CapturedBody run_body(Context& context, runtime::BodyCapture& capture, const step_internal::Call& call,
                               const std::vector<at::Tensor>& inputs, const std::string& training_flags, size_t m);

}  // namespace smp::engine
