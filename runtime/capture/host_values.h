// Tensors that a body has brought to the CPU: their content is real, and operators on them are both run and recorded, so
// that a body may print them, look at them through pointers, or go on computing with them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/operator_info.h"

namespace smp::runtime {

/// What host values ask of the run of the body that they belong to.
class BodyRun {
 public:
  virtual ~BodyRun() = default;
  /// Records or matches an operator; its results are ghosts.
  virtual void record_or_match(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
  /// The content that the tensors have now.
  virtual std::vector<at::Tensor> read(const std::vector<at::Tensor>& tensors) = 0;
  /// By the graph: of a ghost, or of a tensor that the stages hold. -1: the operators so far have not met it.
  virtual int32_t memory_of(const at::Tensor& tensor) const = 0;
  virtual const GhostRun& ghost_run() const = 0;
  /// For texts.
  virtual const std::string& current_module() const = 0;
};

class HostValues {
 public:
  HostValues(const Bindings& bindings, BodyRun& run) : bindings_(bindings), run_(run) {}
  HostValues(const HostValues&) = delete;
  HostValues& operator=(const HostValues&) = delete;

  bool empty() const { return hosts_.empty(); }
  void clear() noexcept;
  /// Brings a ghost to the CPU; other tensors are there. `source`: what it is a copy of, or itself.
  at::Tensor host_of(const at::Tensor& ghost, const at::Tensor& source);
  /// What stands in the recording for a tensor that leaves the body. Throws when it was written to through a pointer.
  at::Tensor ghost_leaving(const at::Tensor& tensor) const;
  /// Throws when autograd knows more of one than that it requires a gradient.
  void check_histories() const;
  /// An operator, some of whose arguments may be here.
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack);

 private:
  struct HostTensor {
    WeakTensor real;   // what the body holds, or has dropped
    at::Tensor ghost;  // what stands for it in the recording
  };
  /// Memory of such values as operators left it: what the recording knows of.
  struct HostMemory {
    c10::Storage storage;
    at::Tensor bytes;
  };
  /// An operator on them.
  struct HostCall {
    torch::jit::Stack real;           // the arguments as the body gave them, later the results
    std::vector<at::Tensor> hosts{};  // among these
    std::vector<at::Tensor> written{};
    bool is_real = true;         // no other tensor is a ghost, or a parameter, whose content may be elsewhere
    bool requires_grad = false;  // as the recording sees the hosts
  };

  at::Tensor ghost_of(const at::Tensor& tensor) const;
  void check_history(const at::Tensor& real) const;
  void follow_gradients();
  void add(const at::Tensor& real, const at::Tensor& ghost);
  void note_memory(const at::Tensor& real, bool is_written);
  void check_memory(const at::Tensor& real, const std::string& reader) const;
  HostCall take_ghosts(const OperatorInfo& info, torch::jit::Stack& stack) const;
  void finish_host_call(const HostCall& call, size_t first, torch::jit::Stack& stack);
  void update_hosts(const HostCall& call, size_t first, torch::jit::Stack& stack);
  void update_aliases(const std::vector<at::Tensor>& written, const HostCall& call);

  const Bindings& bindings_;
  BodyRun& run_;
  std::vector<HostTensor> hosts_;
  std::vector<at::Tensor> written_;  // a custom function may leave its own on one that the body drops at once
  std::vector<HostMemory> memory_;
};

/// The tensor whose content a call wants on the CPU: cpu(), or printing. Undefined for other calls.
at::Tensor asked_for_on_host(const OperatorInfo& info, const torch::jit::Stack& stack);

}  // namespace smp::runtime
