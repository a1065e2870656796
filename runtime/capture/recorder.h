// Records the operators of one step body on ghosts: in which order they are checked, run, and made part of the recording.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/ghost_calls.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/identities.h"
#include "runtime/capture/match.h"
#include "runtime/capture/memories.h"
#include "runtime/capture/memory_rules.h"
#include "runtime/capture/meta/meta_kernels.h"
#include "runtime/capture/recording.h"

namespace smp::runtime {

/// What could not be run again elsewhere with the same numbers throws, naming operator and module (docs/refusals.md).
class Recorder : public Interceptor {
 public:
  /// Its ghosts are those of `run`.
  Recorder(const Bindings& bindings, GhostRun run) : bindings_(bindings), run_(std::move(run)) {}

  /// Makes one ghost per step argument.
  std::vector<at::Tensor> start(const std::vector<at::Tensor>& inputs);
  /// Continues where a matched run left its recording: the operators so far are taken over and run again on stand-ins.
  /// `seen`: by value the tensors that the body holds already, undefined where it has dropped them.
  void continue_from(const Match& matched, const std::vector<at::Tensor>& seen);

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  /// The value of a tensor that leaves the body. Throws when it is not one of the body's.
  partitioner::ValueId value_of(const at::Tensor& tensor, const char* role);
  /// The alias set of a tensor that the operators so far have met; -1: none has.
  int32_t memory_of(const at::Tensor& tensor) const;
  /// Another backward of the body starts at `loss`, after the first `position` operators. Later ones must not write to
  /// memory that it needs: the stages run the backwards after all of them.
  void add_backward_root(const at::Tensor& loss, partitioner::NodeId position);
  /// The body looks at the content that this value has after the first `position` operators. Returns the value that
  /// keeps it: a copy, if the value is memory of the model.
  partitioner::ValueId add_read(partitioner::ValueId value, partitioner::NodeId position);
  /// What is asked for of a tensor that inputs and constants alone decide; null: they do not.
  std::optional<ValueRead> local_read(const at::Tensor& tensor) const;
  /// What is recorded so far.
  const Recording& recording() const { return *recording_; }
  /// Closes the recording.
  std::shared_ptr<Recording> finish(std::vector<partitioner::ValueId> returned, std::string key);

 private:
  void run_again(partitioner::NodeId n, std::vector<at::Tensor>& live);
  void refuse_unsupported(const OperatorInfo& info, const torch::jit::Stack& stack) const;
  void note_module(partitioner::Node& node);
  void hold_written(const OperatorInfo& info, const partitioner::Node& node, const std::vector<c10::IValue>& arguments);
  void check_list_write(const OperatorInfo& info, const partitioner::Argument& written, const c10::IValue& seen) const;
  void bind_output(partitioner::Node& node, const at::Tensor& seen);
  void keep_before_write(const OperatorInfo& info, const torch::jit::Stack& stack);
  partitioner::ValueId keep_content(partitioner::ValueId value);

  const Bindings& bindings_;
  const GhostRun run_;
  OverPythonsKernels kernels_;
  std::shared_ptr<Recording> recording_ = std::make_shared<Recording>();
  Memories memories_{recording_->storages};
  Identities tensors_{bindings_, run_, *recording_, memories_};
  GhostCalls calls_{tensors_, bindings_};
  MemoryRules rules_{*recording_};
  std::vector<at::Tensor> held_;  // ghosts that the body has written to
  int32_t num_random_ = 0;
};

}  // namespace smp::runtime
