// Records one microbatch of a stage, forward and backwards, down to leaf operators, while autograd runs it (docs/tape.md).
#pragma once

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/capture/ghosts.h"
#include "runtime/capture/interceptor.h"
#include "runtime/stage/stage_watcher.h"
#include "runtime/stage/tape.h"

namespace smp::runtime {

/// Tensors are known by their TensorImpl, else by memory and geometry: autograd hands out what it has saved as new
/// tensors. Holds them weakly, so that the recorded microbatch needs no more memory than any other.
///
/// What cannot be taped is noted, not thrown: the microbatch goes on under autograd.
class TapeRecorder : public StageWatcher, private Interceptor {
 public:
  /// own: parameters, buffers and constants, as they are outside of autograd.
  explicit TapeRecorder(std::vector<TapeOwn> own);

  void entered(partitioner::ValueId value, const at::Tensor& tensor) override;
  void call_operator(const c10::OperatorHandle& op, torch::jit::Stack& stack, partitioner::NodeId node,
                     int32_t random_ordinal) override;
  void run_backward(const std::function<void()>& engine) override;
  bool gradient_made(partitioner::ValueId parameter, const at::Tensor& gradient) override;

  void end_forward(const std::vector<at::Tensor>& outputs);
  void begin_backward(const std::vector<at::Tensor>& gradients);
  void end_backward(const std::vector<at::Tensor>& results);

  /// Why there is no tape; empty while there may be one.
  const std::string& refusal() const { return refusal_; }
  TapeLists take() { return std::move(lists_); }

 private:
  struct Known {
    WeakTensor tensor;  // keeps the address from being used again
    int32_t slot;
  };
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    int32_t number;
    std::vector<int32_t> slots;  // in the order in which they were made
  };

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  void record(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void take_argument(TapeCall& call, uint32_t position, const c10::IValue& value, const std::string& op);
  bool record_views(const TapeCall& call, const std::vector<at::Tensor>& outputs);
  void call(const c10::OperatorHandle& op, torch::jit::Stack& stack, bool writes);
  void note_write(const at::Tensor& tensor);
  partitioner::NodeId node_of_backward() const;
  void push(TapeCall call);
  int32_t add(const at::Tensor& tensor);
  int32_t known_slot(const at::Tensor& tensor) const;
  int32_t slot_of(const at::Tensor& tensor, const std::string& reader);
  void refuse(const std::string& reason);

  TapeLists lists_;
  std::string refusal_;
  std::unordered_map<const c10::TensorImpl*, Known> tensors_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
  int32_t num_memories_ = 0;
  std::unordered_map<partitioner::ValueId, size_t> own_position_;
  bool is_in_backward_ = false;
  bool is_writing_ = false;                                   // an operator that writes in place runs
  partitioner::NodeId node_ = partitioner::kNoNode;           // whose operator runs, or ran last
  std::map<uint64_t, partitioner::NodeId> node_by_sequence_;  // by the number behind the last autograd node that it made
  int32_t random_ordinal_ = -1;                               // of that, until its first leaf
  Draws draws_ = Draws::kByThread;                            // of that
};

}  // namespace smp::runtime
