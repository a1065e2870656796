// The flat replay of a stage's operators: argument templates prepared once, tensors freed at last use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/stage/flat_call.h"
#include "runtime/stage/stage.h"
#include "runtime/stage/stage_watcher.h"

namespace smp::runtime {

/// "aten::addmm of module 'encoder.0'".
std::string describe_operator(const std::string& op, const std::string& module);
/// "aten::addmm of module 'encoder.0', microbatch 2".
std::string describe_run(const std::string& op, const std::string& module, int microbatch);

class Replay {
 public:
  Replay(const partitioner::Graph& graph, const std::vector<partitioner::NodeId>& nodes,
         const std::vector<partitioner::ValueId>& kept);

  /// Slot of a value that the nodes read or make, or that is kept; -1 when the value is none of these.
  int slot_of(partitioner::ValueId value) const { return slot_of_value_[static_cast<size_t>(value)]; }
  size_t num_slots() const { return num_slots_; }
  /// Values read that no node of the stage makes, ascending.
  const std::vector<partitioner::ValueId>& external() const { return external_; }
  bool has_random() const { return has_random_; }

  /// Runs every operator in order. Slots of external values are filled by the caller; slots of kept values are filled
  /// at the end, the others are empty again. A watcher, if any, runs the operators. Returns what to say if the backward
  /// throws because it needs parameters or buffers that were written after they had been saved; empty: none were.
  std::string run(Slots& slots, const MicrobatchContext& context, const std::function<void()>& progress,
                  StageWatcher* watcher = nullptr);

 private:
  /// A parameter or buffer that operators of the stage write to, in the hands of one that may save it: it gets a copy, since
  /// the next microbatch may write before the backward of this one.
  struct Kept {
    uint32_t position;          // in the operator's arguments
    int32_t element = -1;       // of a list of tensors; -1: no list
    std::string overwritten{};  // what to say of an operator behind this one that writes to it; empty: none does
  };
  struct Copy {
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
    c10::VariableVersion version;
  };
  struct Call : FlatCall {
    std::vector<Kept> kept{};                     // without those that have turned out not to be saved
    std::vector<partitioner::TensorSpec> made{};  // as recorded; by outputs
    bool grad_enabled = true;
    partitioner::Autocast autocast{};
    int32_t random_ordinal = -1;
    partitioner::NodeId node = partitioner::kNoNode;
    std::string module{};  // for error texts
  };

  int assign_slot(partitioner::ValueId value);
  void prepare(const partitioner::Graph& graph, partitioner::NodeId n);
  void find_writes(const partitioner::Graph& graph, const std::vector<partitioner::NodeId>& nodes);
  void keep_if_written(const partitioner::Graph& graph, partitioner::NodeId n, Kept place, partitioner::ValueId id,
                       Call& call) const;
  void plan_frees(const std::vector<partitioner::ValueId>& kept);
  void push_arguments(const Call& call, const Slots& slots, const MicrobatchContext& context, size_t& next_override);
  void call_operator(const Call& call, const MicrobatchContext& context, StageWatcher* watcher);
  void check_results(const Call& call) const;
  std::vector<Copy> give_copies(const Call& call, StageWatcher* watcher);
  void note_saved(Call& call, std::vector<Copy> copies);
  std::string mark_overwritten();

  std::vector<Call> calls_;
  std::vector<int32_t> slot_of_value_;
  std::vector<partitioner::ValueId> external_;
  size_t num_slots_ = 0;
  bool has_random_ = false;
  /// By alias set of the parameters and buffers that are written; kNoNode: in a way that autograd does not notice.
  std::unordered_map<int32_t, partitioner::NodeId> last_noticed_write_;
  std::vector<std::pair<Copy, std::string>> overwritten_;  // of the run under way
  torch::jit::Stack stack_;
};

}  // namespace smp::runtime
