// A stage under autograd: the reference implementation.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/libtorch/node_handle.h"
#include "runtime/stage/replay.h"
#include "runtime/stage/stage.h"
#include "runtime/stage/stage_watcher.h"

namespace smp::runtime {

/// The producer of a stage's inputs as far as autograd knows: receives their gradients, whole, when all are there.
struct InputGradients : torch::autograd::Node {
  std::vector<at::Tensor> gradients;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override {
    gradients = std::move(inputs);
    return {};
  }
  std::string name() const override { return "smp::InputGradients"; }
};

class AutogradStage : public Stage {
 public:
  AutogradStage(const partitioner::Graph& graph, const partitioner::Plan& plan, int stage, StageOptions options);

  const StageValues& values() const override { return values_; }
  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors) override {
    return forward(context, std::move(inputs), tensors, nullptr);
  }
  /// The watcher sees this microbatch until its last backward has ended.
  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors, StageWatcher* watcher);
  std::vector<at::Tensor> backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) override;
  void drop(int microbatch) override { in_flight_.erase(microbatch); }
  void reset() override { in_flight_.clear(); }

  /// Parameters, buffers and constants that the operators read, ascending.
  std::vector<partitioner::ValueId> own_values() const;

 private:
  struct InFlight {
    HandleOf<InputGradients> gradients;
    std::vector<uint32_t> edges;                 // by input, then by own tensor: its number at that node
    std::vector<std::vector<at::Tensor>> roots;  // by backward and its roots
    StageWatcher* watcher = nullptr;
    std::string overwritten;  // what to say if the backward throws; may be empty
  };
  struct Entry {
    partitioner::ValueId value;
    bool needs_gradient;  // that leaves the stage, rather than ending in a parameter here
  };

  bool leaves(partitioner::ValueId id) const;
  size_t entry_of(partitioner::ValueId id, int stage) const;
  void attach(at::Tensor& input, size_t entry, InFlight& flight) const;
  at::Tensor own_tensor(size_t i, const TensorLookup& tensors, InFlight& flight) const;
  std::vector<at::Tensor> take_results(InFlight& flight, size_t index) const;

  StageValues values_;
  StageOptions options_;
  Replay replay_;
  std::vector<Entry> entries_;                       // inputs
  std::vector<Entry> own_tensors_;                   // parameters, buffers, constants
  std::vector<std::vector<size_t>> result_entries_;  // by backward and its results
  std::map<int, InFlight> in_flight_;
};

}  // namespace smp::runtime
