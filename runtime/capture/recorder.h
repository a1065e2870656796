// Records the operators of one step body on ghosts. Owns the identity of every tensor the body touches.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>

#include "runtime/capture/bindings.h"
#include "runtime/capture/ghost_calls.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/history.h"
#include "runtime/capture/memory_rules.h"
#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/recording.h"

namespace smp::runtime {

/// A ghost knows its value itself. A real tensor is known by its TensorImpl, else by its storage, else it is a parameter,
/// buffer or constant from now on. What could not be run again elsewhere with the same numbers throws, naming operator and
/// module (docs/refusals.md lists it).
class Recorder : public Interceptor {
 public:
  /// Its ghosts are those of `run`.
  Recorder(const Bindings& bindings, GhostRun run);

  /// Makes one ghost per step argument.
  std::vector<at::Tensor> start(const std::vector<at::Tensor>& inputs);
  /// Continues where a matched run left its recording: the first `num_nodes` operators are taken over and run again on
  /// stand-ins. `seen`: by value the tensors that the body holds already, undefined where it has dropped them; `used`: the
  /// constants so far.
  void continue_from(const CapturedBody& matched, const std::vector<at::Tensor>& seen,
                     const std::vector<c10::Storage>& storages, const std::vector<ConstantTensor>& used,
                     partitioner::NodeId num_nodes);

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
  /// Closes the recording.
  std::shared_ptr<Recording> finish(std::vector<partitioner::ValueId> returned, std::string key);

 private:
  /// A real tensor: a parameter, buffer or constant, or an alias of one made behind the dispatcher.
  struct Identity {
    partitioner::ValueId value;
    at::Tensor tensor;  // held, so that its address stays its own
    at::Tensor stand_in;
    History history;
  };
  /// Of real tensors, stand-ins or ghosts: several names of one memory.
  struct StorageInfo {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int32_t id;  // -1: of no value yet
    partitioner::ValueId first_value;
    at::Tensor first_tensor;         // its stand-in, where it is kept
    c10::Storage ghosts{};           // while there is no id
    const Device* device = nullptr;  // where memory is that the body brings along
  };

  partitioner::ValueId resolve(const at::Tensor& tensor);
  partitioner::ValueId resolve_ghost(const at::Tensor& tensor, const Ghost& ghost);
  partitioner::ValueId bind_real(const at::Tensor& tensor, const at::Tensor& geometry, partitioner::Value value);
  partitioner::ValueId bind_constant(const at::Tensor& tensor);
  partitioner::ValueId alias_of(const StorageInfo& storage, const at::Tensor& tensor);
  partitioner::ValueId new_value(partitioner::Value value, const at::Tensor& seen);
  void take_real(partitioner::ValueId id, const at::Tensor& tensor, const at::Tensor& geometry);
  void take_value(partitioner::ValueId id, const at::Tensor& seen);

  const StorageInfo* find_storage(const at::Tensor& tensor) const;
  StorageInfo& storage_info(const at::Tensor& tensor);
  int32_t storage_id(const at::Tensor& stand_in, partitioner::ValueId value);
  void name_storage(StorageInfo& storage, int32_t id, partitioner::ValueId first_value);
  c10::Storage ghost_storage(const at::Tensor& stand_in);
  at::Tensor stand_in_of(const at::Tensor& tensor) const;
  at::Tensor ghost_of(const at::Tensor& stand_in);
  at::Tensor ghost_of_input(const partitioner::TensorSpec& spec, size_t position);

  partitioner::ValueId synthesise(const char* op, std::vector<partitioner::Argument> arguments, partitioner::TensorSpec spec,
                                  int32_t storage, bool grad_enabled);
  partitioner::ValueId keep_content(partitioner::ValueId value);
  void keep_before_write(const OperatorInfo& info, const torch::jit::Stack& stack);
  void run_again(partitioner::NodeId n, std::vector<at::Tensor>& live);
  void adopt(partitioner::ValueId id, const at::Tensor& made);

  void refuse_unsupported(const OperatorInfo& info, const torch::jit::Stack& stack) const;
  void check_as_before(const at::Tensor& tensor, const Identity& known) const;
  void check_not_frozen(const at::Tensor& tensor, const partitioner::Value& value) const;
  void check_made_here(const at::Tensor& tensor) const;
  void check_history(const at::Tensor& tensor, const Identity& known) const;
  void check_histories() const;
  std::vector<GradientChange> follow_writes(const partitioner::Node& node);
  void hold_written(const OperatorInfo& info, const partitioner::Node& node, const std::vector<c10::IValue>& arguments);
  void check_list_write(const OperatorInfo& info, const partitioner::Argument& written, const c10::IValue& seen) const;
  void note_module(partitioner::Node& node);
  void bind_output(partitioner::Node& node, const at::Tensor& seen);
  std::string where() const;

  const Bindings& bindings_;
  const GhostRun run_;
  OverPythonsKernels kernels_;
  GhostCalls calls_;
  std::shared_ptr<Recording> recording_;
  MemoryRules rules_;
  std::unordered_map<const c10::TensorImpl*, Identity> identities_;
  std::unordered_map<const c10::StorageImpl*, StorageInfo> storages_;
  std::vector<WeakTensor> ghosts_;                 // by first value
  std::vector<at::Tensor> held_;                   // ghosts that the body has written to
  std::string maker_;                              // of results, for texts
  const Device* makes_on_ = &this_ranks_device();  // results of their own memory
  int32_t num_storages_ = 0;
  int32_t num_random_ = 0;
  std::string last_module_;
};

}  // namespace smp::runtime
