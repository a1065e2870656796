// Around the call of a body.
#include "smp/engine/arguments/run_body.h"

#include <c10/util/ScopeExit.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

namespace smp::engine {

HeldGradients::HeldGradients(const runtime::Bindings& bindings) {
  for (const runtime::NamedTensor& named : bindings.tensors()) {
    if (named.kind == partitioner::ValueKind::kParameter) gradients_.emplace_back(named.tensor, named.tensor.grad());
  }
}

int64_t HeldGradients::put_back() {
  int64_t num_changed = 0;
  for (auto& [parameter, gradient] : gradients_) {
    if (parameter.grad().is_same(gradient)) continue;
    ++num_changed;
    parameter.mutable_grad() = gradient;
  }
  return num_changed;
}

runtime::CapturedBody run_body(Context& context, runtime::BodyCapture& capture, const step_internal::Call& call,
                               const std::vector<at::Tensor>& inputs, const std::string& training_flags, size_t m) {
  const std::vector<at::Tensor> ghosts = capture.begin(inputs, training_flags);
  context.body_in_progress = &capture;  // calls of this rank come from the body
  const auto end = c10::make_scope_exit([&] { context.body_in_progress = nullptr; });
  try {
    std::vector<at::Tensor> returned;
    {
      // TorchScript calls the operators of a module as they are written, in every run, and not those of gradients and fused
      // code that it makes of them in its third.
      const bool optimises = torch::jit::getGraphExecutorOptimize();
      torch::jit::setGraphExecutorOptimize(false);
      const auto optimise = c10::make_scope_exit([&] { torch::jit::setGraphExecutorOptimize(optimises); });
      const runtime::InterceptScope intercept(capture);
      returned = call.body(ghosts, static_cast<int64_t>(m));
    }
    return capture.finish(returned);
  } catch (...) {
    capture.abandon();
    throw;
  }
}

}  // namespace smp::engine
