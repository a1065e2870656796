// A run of a step body that has equalled an earlier recording so far. Owns the ghosts that it hands out.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <memory>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/match.h"

namespace smp::runtime {

/// Compares operator by operator and answers with ghosts, without running anything. What differs and leaves the graph as it
/// is, numbers and constants, becomes part of the run. What does not match changes nothing.
class Matcher {
 public:
  explicit Matcher(const Bindings& bindings) : bindings_(bindings) {}

  /// Begins a run; returns the ghosts of the step's arguments.
  std::vector<at::Tensor> start(std::shared_ptr<Recording> recording, const GhostRun& ghosts);
  void reset() noexcept;

  /// Whether the call is the recording's next one.
  bool matches_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  /// Replaces the arguments of a call that matches by its results, and goes on behind it.
  void answer(torch::jit::Stack& stack);
  /// Whether `loss` is where the recording's backward of that number starts.
  bool matches_root(const at::Tensor& loss, size_t number);
  /// Whether the recording ends here, with as many backwards and these results.
  bool matches_end(const std::vector<at::Tensor>& returned, size_t num_roots);

  /// Goes on with the first of `others` that this run might be as well, its first `num_roots` backwards included, and for
  /// which goes_on() says that what comes next is what it expects. Returns it, or null and leaves the run as it was.
  std::shared_ptr<Recording> switch_to_one_of(const std::vector<std::shared_ptr<Recording>>& others, size_t num_roots,
                                              const std::function<bool()>& goes_on);

  /// The values that `tensors` have now: of several with one ghost (written in place) the last one. False when one is none
  /// of those of the operators so far.
  bool find_values(const std::vector<at::Tensor>& tensors, std::vector<partitioner::ValueId>& values) const;
  /// By value: parameters and buffers, and the ghosts that the body still holds.
  std::vector<at::Tensor> tensors_so_far() const;
  /// Throws when autograd knows more of a tensor of the run than it was handed out with.
  void check_histories() const;
  /// How far it has come.
  const Match& match() const { return at_; }
  /// Of the call that it expects next.
  const OperatorInfo& next_info() const { return *at_.recording->calls[static_cast<size_t>(at_.position)].info; }

 private:
  /// What matching adds to.
  struct Marks {
    size_t scalars, constants, used, copies;
  };
  Marks marks() const;
  void go_back_to(const Marks& before);
  /// matches(), of which nothing stays unless it returns true.
  template <class Matches>
  bool keeps_if(const Matches& matches);
  bool matches_argument(const c10::IValue& actual, const partitioner::Argument& recorded, int32_t position);
  bool matches_tensor(const at::Tensor& actual, partitioner::ValueId recorded);
  bool matches_copy(const at::Tensor& actual, Ghost& ghost, partitioner::ValueId recorded);
  bool matches_constant(const at::Tensor& actual, partitioner::ValueId recorded);
  at::Tensor hand_out(partitioner::ValueId id);
  void follow_writes(const RecordedCall& call, const torch::jit::Stack& stack);

  const Bindings& bindings_;
  Match at_;
  GhostRun ghost_run_;
  std::vector<WeakTensor> ghosts_;   // by first value
  std::vector<at::Tensor> written_;  // of these, what operators have written to
  std::vector<at::Tensor> copies_;   // of these, what was made behind the dispatcher
};

}  // namespace smp::runtime
