// A stage's forward and backwards as flat lists of leaf operators, run without autograd: the same kernels in the same order
// as autograd ran them when the tape was recorded. Knows the graph for the texts of errors only; TapeRecorder fills it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/device/graph.h"
#include "runtime/device/random.h"
#include "runtime/stage/stage.h"
#include "runtime/stage/tape_lists.h"

namespace smp::runtime {

/// Receives the gradient of a parameter (by its position among the own tensors) as soon as it is whole.
using GradientSink = std::function<void(size_t own, at::Tensor gradient)>;

class Tape {
 public:
  /// Runs what is the same in every microbatch, drops what nobody uses and cannot throw, folds views of fixed tensors into
  /// arguments, plans when tensors die.
  /// `recomputation`, if any: keeps what enters the forward, what that keeps, and what cannot be computed again.
  Tape(TapeLists recorded, const partitioner::Graph& graph, bool folds_host_tensors = true,
       const partitioner::Recomputation* recomputation = nullptr);

  struct RunContext {
    RandomState random;
    int microbatch = 0;
    const std::function<void()>& progress;  // called between operators; may be empty
    const OperatorTimer& timer;             // called behind each of them; may be empty
    DeviceGraph* graph = nullptr;           // that records the run: it draws as the graph says
  };

  const TapeLists& lists() const { return lists_; }
  /// Fills the slots of one microbatch, runs the forward and returns the outputs. `own`: by position in lists().own.
  std::vector<at::Tensor> forward(Slots& slots, std::vector<at::Tensor> inputs, const std::vector<at::Tensor>& own,
                                  const RunContext& context);
  /// Runs one backward until its results are there. Slots that later calls need stay filled. A gradient that enters in
  /// another geometry than was recorded is copied; throws c10::Error where that cannot be, or one is undefined that was not.
  std::vector<at::Tensor> backward(Slots& slots, size_t index, std::vector<at::Tensor> gradients, const RunContext& context,
                                   const GradientSink& sink);
  /// Versions of the parameters and buffers that backwards read where they are. Throws c10::Error, as autograd does, if they
  /// are not those of its forward any more.
  std::vector<int64_t> versions() const;
  void check_versions(const std::vector<int64_t>& of_forward) const;
  /// Whether the last backward leaves gradients of parameters to weight_gradients().
  bool leaves_weights() const {
    return !lists_.backwards.empty() && lists_.backwards.back().results_end < lists_.backwards.back().end;
  }
  void weight_gradients(Slots& slots, const RunContext& context, const GradientSink& sink);

 private:
  void run(Slots& slots, size_t begin, size_t end, const RunContext& context, const GradientSink* sink);
  void run_calls(Slots& slots, size_t& n, size_t end, const RunContext& context, const GradientSink* sink);
  /// While a backward draws.
  std::unique_ptr<UserRandomStateScope> user_state_of(const RunContext& context) const;
  void fit_roots(size_t index, std::vector<at::Tensor>& gradients) const;
  const at::Tensor& at(const Slots& slots, int32_t slot) const;

  const partitioner::Graph& graph_;
  TapeLists lists_;
  Slots fixed_;                      // by slot: fixed tensors and their views, undefined elsewhere
  std::vector<int32_t> read_fixed_;  // slots of fixed tensors that calls read there
  std::vector<size_t> saved_own_;    // fixed tensors that a backward reads, by position
  torch::jit::Stack stack_;
};

}  // namespace smp::runtime
