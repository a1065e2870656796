// Which value of a recording each tensor of the body is, what stands for it, and what autograd knew of it when an operator
// has used it.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/history.h"
#include "runtime/capture/memories.h"
#include "runtime/capture/recording.h"

namespace smp::runtime {

/// A ghost knows its value itself. A real tensor is known by its TensorImpl, else by its storage, else it is a parameter,
/// buffer or constant from now on.
class Identities {
 public:
  /// Adds values to `recording`, and hands out ghosts of `run`.
  Identities(const Bindings& bindings, const GhostRun& run, Recording& recording, Memories& memories)
      : bindings_(bindings), run_(run), recording_(recording), memories_(memories) {}

  /// The value of a tensor that the body uses. Throws where it is none, or where autograd knows more of it than operators
  /// have told.
  partitioner::ValueId resolve(const at::Tensor& tensor);
  /// Without side effects: kNoValue, where no operator has met it.
  partitioner::ValueId find(const at::Tensor& tensor) const;
  /// A new value, which `seen`, a ghost or a real tensor known already, is from now on.
  partitioner::ValueId add(partitioner::Value value, const at::Tensor& seen);

  /// From now on `seen`, a ghost or a real tensor known already, has the value `id`.
  void take(partitioner::ValueId id, const at::Tensor& seen);
  /// The same of a real tensor that is not known yet. `geometry`: the tensor itself, or the dense copy of a constant.
  void take_real(partitioner::ValueId id, const at::Tensor& tensor, const at::Tensor& geometry);
  /// The same of what an operator has made that was run again.
  void adopt(partitioner::ValueId id, const at::Tensor& made);

  /// The meta tensor for any tensor of a call.
  at::Tensor stand_in_of(const at::Tensor& tensor) const;
  /// A ghost for the meta tensor of a result.
  at::Tensor ghost_of(const at::Tensor& stand_in);
  at::Tensor ghost_of_input(const partitioner::TensorSpec& spec, size_t position);
  const GhostRun& run() const { return run_; }

  /// What an operator has written to requires a gradient since, or none any more, under each of its names.
  std::vector<GradientChange> follow_writes(const std::vector<int32_t>& written_storages);
  /// No operator follows: looks once more at all tensors, and fills Recording::tensors.
  void close();

 private:
  /// A real tensor: a parameter, buffer or constant, or an alias of one made behind the dispatcher.
  struct Identity {
    partitioner::ValueId value;
    at::Tensor tensor;  // held, so that its address stays its own
    at::Tensor stand_in;
    History history;
    bool was_trained;  // without grad mode, in which a constant is used then
  };

  partitioner::ValueId resolve_ghost(const at::Tensor& tensor, const Ghost& ghost);
  partitioner::ValueId bind_real(const at::Tensor& tensor, const at::Tensor& geometry, partitioner::Value value);
  partitioner::ValueId bind_constant(const at::Tensor& tensor);
  partitioner::ValueId alias_of(const Memories::Memory& memory, const at::Tensor& tensor);
  void check_as_before(const at::Tensor& tensor, const Identity& known) const;
  void check_history(const at::Tensor& tensor, const Identity& known) const;
  void check_not_frozen(const at::Tensor& tensor, const partitioner::Value& value) const;
  void check_made_here(const at::Tensor& tensor) const;
  void check_untrained(const at::Tensor& constant) const;

  const Bindings& bindings_;
  const GhostRun& run_;
  Recording& recording_;
  Memories& memories_;
  std::unordered_map<const c10::TensorImpl*, Identity> by_impl_;
  std::vector<WeakTensor> ghosts_;  // by first value
};

}  // namespace smp::runtime
