// One microbatch run under autograd and then from a tape: every bit that leaves the stage is compared.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/stage/autograd_stage.h"
#include "runtime/stage/stage_watcher.h"
#include "runtime/stage/tape.h"

namespace smp::runtime {

/// Keeps inputs and gradients that enter, and digests of what leaves; never two sets of activations or gradients. The
/// gradients of parameters that autograd makes are thrown away: those of the tape are added, each after it has been found
/// equal. Where one is not, autograd runs the microbatch once more for it and the rest.
class TapeComparison : private StageWatcher {
 public:
  TapeComparison(AutogradStage& reference, Tape& tape, MicrobatchContext context, const std::vector<at::Tensor>& inputs,
                 std::vector<at::Tensor> own);

  /// The microbatch under autograd. The results are those of the stage.
  std::vector<at::Tensor> forward(std::vector<at::Tensor> inputs);
  std::vector<at::Tensor> backward(size_t index, std::vector<at::Tensor> gradients);
  /// Runs the tape. To be called after the last backward, or after the forward of a stage without one. What that backward
  /// has given is not needed any more, and not held: `results` are the same bits, made anew. Returns what differs first;
  /// empty: nothing.
  std::string finish(const std::function<void()>& progress, std::vector<at::Tensor>& results);

 private:
  /// A tensor of this rank that the forward writes to.
  struct Written {
    at::Tensor tensor, before;
  };

  bool gradient_made(partitioner::ValueId parameter, const at::Tensor& gradient) override;
  bool note(const std::string& what, const at::Tensor& tensor);
  void note_forward(const std::vector<at::Tensor>& outputs);
  void note_results(size_t index, const std::vector<at::Tensor>& results);
  void run_tape(const std::function<void()>& progress, std::vector<at::Tensor>& results);
  void run_autograd_again(std::vector<at::Tensor>& results);
  void repeat_forward(const std::function<void()>& forward);
  std::vector<at::Tensor> copied_inputs() const;
  TensorLookup lookup() const;

  AutogradStage& reference_;
  Tape& tape_;
  MicrobatchContext context_;
  std::vector<at::Tensor> inputs_, own_;
  std::vector<partitioner::ValueId> own_values_;
  std::vector<Written> written_;
  std::vector<std::vector<at::Tensor>> roots_;                      // by backward
  std::unordered_map<std::string, std::deque<uint64_t>> expected_;  // digests of what autograd gave, by what it is, in order
  bool is_comparing_ = false;
  std::unordered_map<partitioner::ValueId, int> num_added_;  // gradients of the tape, by parameter
  std::string difference_;
};

}  // namespace smp::runtime
