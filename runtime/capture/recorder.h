// Records the operators of one step body on ghosts. Owns the identity of every tensor the body touches.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <unordered_set>

#include "runtime/capture/bindings.h"
#include "runtime/capture/history.h"
#include "runtime/capture/interceptor.h"
#include "runtime/capture/recording.h"

namespace smp::runtime {

/// A tensor is known by its TensorImpl (held weakly), else by its storage, else it is a parameter, buffer or constant
/// from now on. What could not be run again elsewhere with the same numbers throws, naming operator and module
/// (docs/refusals.md lists it).
class Recorder : public Interceptor {
 public:
  explicit Recorder(const Bindings& bindings);

  /// Makes one ghost per step argument.
  std::vector<at::Tensor> start(const std::vector<at::Tensor>& inputs);
  /// Continues where a matched run left its recording: the first `num_nodes` operators are taken over and run again on
  /// ghosts, and `seen`, by value the tensors that the body holds already, stand for their values. `used`: the constants
  /// so far; `copied`: first values of ghosts that the body holds a copy of, not `seen` itself.
  void continue_from(const CapturedBody& matched, std::vector<at::Tensor> seen, const std::vector<ConstantTensor>& used,
                     const std::vector<partitioner::ValueId>& copied, partitioner::NodeId num_nodes);

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  /// The value of a tensor that leaves the body. Throws when it is not one of the body's.
  partitioner::ValueId value_of(const at::Tensor& tensor, const char* role);
  /// The alias set of a tensor that the operators so far have met; -1: none has.
  int32_t memory_of(const at::Tensor& tensor) const;
  /// Of the parameter or buffer used last; "" before any was.
  const std::string& last_module() const { return last_module_; }
  /// Another backward of the body starts at `loss`, after the first `position` operators. Later ones must not write to
  /// memory that it needs: the stages run the backwards after all of them.
  void add_backward_root(const at::Tensor& loss, partitioner::NodeId position);
  /// The body looks at the content that this value has after the first `position` operators. Returns the value that
  /// keeps it: a copy, if the value is memory of the model.
  partitioner::ValueId add_read(partitioner::ValueId value, partitioner::NodeId position);
  /// What is recorded so far.
  const Recording& recording() const { return *recording_; }
  /// Closes the recording: fresh ghosts replace those the body saw, so that one kept by the user is recognised.
  std::shared_ptr<Recording> finish(std::vector<partitioner::ValueId> returned, std::string key);

 private:
  struct Identity {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl;
    partitioner::ValueId value;
    at::Tensor stand_in;  // the tensor operators run on, when it is not the tensor itself
    History history;      // as the last operator has left it
  };
  struct StorageInfo {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int32_t id;
    partitioner::ValueId first_value;
    at::Tensor first_tensor;  // stand-ins of real tensors only: ghosts must be able to die
  };

  partitioner::ValueId resolve(at::Tensor& tensor);
  partitioner::ValueId bind_real(const at::Tensor& tensor, const at::Tensor& geometry, partitioner::Value value,
                                 at::Tensor& stand_in);
  partitioner::ValueId bind_constant(const at::Tensor& tensor, at::Tensor& stand_in);
  partitioner::ValueId alias_of(const StorageInfo& storage, const at::Tensor& tensor, at::Tensor& stand_in);
  bool take_copy(const at::Tensor& tensor, partitioner::ValueId first, at::Tensor& stand_in);
  partitioner::ValueId new_value(partitioner::Value value, const at::Tensor& seen, const at::Tensor& stand_in);
  int32_t storage_id(const at::Tensor& tensor, partitioner::ValueId value, bool hold);

  partitioner::ValueId synthesise(const char* op, std::vector<partitioner::Argument> arguments, partitioner::TensorSpec spec,
                                  int32_t storage, bool grad_enabled);
  partitioner::ValueId keep_content(partitioner::ValueId value);
  void keep_before_write(const OperatorInfo& info, const torch::jit::Stack& stack);
  void run_again(partitioner::NodeId n, const std::vector<at::Tensor>& seen, std::vector<at::Tensor>& live);
  void adopt(partitioner::ValueId id, const at::Tensor& seen, const at::Tensor& stand_in, std::vector<at::Tensor>& live);

  void refuse_unsupported(const OperatorInfo& info, const torch::jit::Stack& stack) const;
  void check_as_before(const at::Tensor& tensor, const Identity& known) const;
  void check_not_frozen(const at::Tensor& tensor, const partitioner::Value& value) const;
  void check_made_here(const at::Tensor& tensor) const;
  void check_history(const at::Tensor& tensor, const Identity& known) const;
  void check_histories() const;
  void note_histories(const partitioner::Node& node);
  void note_writes(const OperatorInfo& info, partitioner::Node& node, const std::vector<c10::IValue>& arguments);
  void check_write(const OperatorInfo& info, partitioner::ValueId id) const;
  void check_backwards_before(const OperatorInfo& info, partitioner::ValueId id) const;
  void check_hidden_writes(partitioner::ValueId root, partitioner::NodeId position) const;
  std::unordered_set<int32_t> hidden_writes(partitioner::NodeId n) const;
  bool may_have_saved(partitioner::ValueId root, partitioner::NodeId position, int32_t storage) const;
  void for_saved(partitioner::ValueId root, partitioner::NodeId position,
                 const std::function<void(partitioner::NodeId, partitioner::ValueId)>& use) const;
  void check_list_write(const OperatorInfo& info, const partitioner::Argument& written, const c10::IValue& seen) const;
  void check_initialised(const OperatorInfo& info, const partitioner::Node& node) const;
  void note_module(partitioner::Node& node);
  void bind_outputs(const OperatorInfo& info, partitioner::Node& node, const std::vector<c10::IValue>& arguments,
                    torch::jit::Stack& stack);
  partitioner::ValueId bind_output(const partitioner::Node& node, int32_t index, const at::Tensor& live,
                                   const at::Tensor& seen);
  void note_changes(Recording& recording) const;
  std::string where() const;

  const Bindings& bindings_;
  std::shared_ptr<Recording> recording_;
  std::unordered_map<const c10::TensorImpl*, Identity> identities_;
  std::unordered_map<const c10::StorageImpl*, StorageInfo> storages_;
  std::unordered_map<partitioner::ValueId, at::Tensor> copied_;  // ghosts of which the body holds a copy
  NodeHandle ghost_grad_fn_;         // of ghosts made for an earlier run
  std::vector<at::Tensor> held_;  // real tensors and stand-ins, so that their addresses stay theirs
  std::unordered_set<int32_t> written_, uninitialised_;
  std::vector<partitioner::NodeId> backward_positions_;  // by backward root: how many operators came before
  int32_t num_storages_ = 0;
  int32_t num_random_ = 0;
  std::string last_module_;
};

/// The value that keeps the content which `value` has after the first `position` operators of a recording: itself, if
/// none writes to it later; kNoValue, if nothing keeps it.
partitioner::ValueId kept_value(const Recording& recording, partitioner::ValueId value, partitioner::NodeId position);

/// How many values the first `num_nodes` operators use or make: the first ones, for values are numbered in order of
/// appearance. Those first used by the next operator do not count.
partitioner::ValueId values_of_prefix(const partitioner::Graph& graph, partitioner::NodeId num_nodes);

/// Ghosts of a finished recording: one tensor per TensorImpl of the body, values of one storage sharing a storage.
/// `only_storages` (by storage id) limits the work to those.
void make_ghosts(Recording& recording, const std::vector<bool>* only_storages = nullptr);

/// Undoes what in-place operators of an earlier run did to geometry and gradient of the ghosts.
void restore_ghosts(Recording& recording);

}  // namespace smp::runtime
