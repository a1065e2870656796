// The flat replay of a stage's operators: argument templates prepared once, tensors freed at last use.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/stage/flat_call.h"
#include "runtime/stage/stage.h"
#include "runtime/stage/stage_watcher.h"

namespace smp::runtime {

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
  /// at the end, the others are empty again. A watcher, if any, runs the operators.
  void run(Slots& slots, const MicrobatchContext& context, const std::function<void()>& progress,
           StageWatcher* watcher = nullptr);

 private:
  struct Call : FlatCall {
    std::vector<uint32_t> kept{};  // positions of buffers that a later write must not change for the backward
    bool grad_enabled = true;
    partitioner::Autocast autocast{};
    int32_t random_ordinal = -1;
    partitioner::NodeId node = partitioner::kNoNode;
    std::string module{};  // for error texts
  };

  int assign_slot(partitioner::ValueId value);
  void prepare(const partitioner::Graph& graph, partitioner::NodeId n);
  void find_written_buffers(const partitioner::Graph& graph);
  void plan_frees(const partitioner::Graph& graph, const std::vector<partitioner::NodeId>& nodes,
                  const std::vector<partitioner::ValueId>& kept);
  void push_arguments(const Call& call, const Slots& slots, const MicrobatchContext& context, size_t& next_override);
  void call_operator(const Call& call, const MicrobatchContext& context, StageWatcher* watcher);
  void keep_buffers(const Call& call, StageWatcher* watcher);
  static std::string place_of(const Call& call, const MicrobatchContext& context);

  std::vector<Call> calls_;
  std::vector<int32_t> slot_of_value_;
  std::vector<partitioner::ValueId> external_;
  size_t num_slots_ = 0;
  bool has_random_ = false;
  std::vector<bool> is_written_buffer_;  // by alias set
  torch::jit::Stack stack_;
};

}  // namespace smp::runtime
