// Captures a step body once per microbatch: recorded the first time, matched afterwards. Owns the recordings.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/equality.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/interceptor.h"
#include "runtime/capture/recorder.h"
#include "runtime/capture/recording.h"
#include "runtime/capture/value_read.h"

namespace smp::runtime {

/// The capture of one step function.
///
///   BodyCapture capture(bindings);
///   auto ghosts = capture.begin(microbatch_arguments, key);
///   { InterceptScope scope(capture);  returned = body(ghosts); }   // the body calls mark_backward(loss)
///   CapturedBody run = capture.finish(returned);
///
/// A run whose operators equal those of an earlier run with the same key is answered from it, without running
/// anything (0.1-0.2 us per operator); at the first difference another recording that began in the same way goes on,
/// else the run goes back to recording. Scalars and constants that differ are part of the CapturedBody, not of the graph.
///
/// A value that the body reads is fetched by the ValueReader; the operators so far are known by then.
class BodyCapture : public Interceptor {
 public:
  /// Keeps the `max_recordings` used last.
  explicit BodyCapture(const Bindings& bindings, int64_t max_recordings = 64)
      : bindings_(bindings), equal_(bindings), max_recordings_(static_cast<size_t>(max_recordings)) {}

  /// Without one, values cannot be read.
  void set_reader(ValueReader reader) { reader_ = std::move(reader); }

  /// `key` tells signatures apart that the geometry of `inputs` does not (training flag, grad mode, …).
  std::vector<at::Tensor> begin(const std::vector<at::Tensor>& inputs, const std::string& key);
  /// A backward of the body starts at `loss`; several run one after the other. The root is the value that `loss` has
  /// now: in-place operators may give it another one later. Throws c10::Error for the same loss again, one that is no
  /// scalar or that requires no gradient.
  void mark_backward(const at::Tensor& loss);
  CapturedBody finish(const std::vector<at::Tensor>& returned);
  /// Drops the run after an exception in the body.
  void abandon() noexcept;

  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  /// Refuses it: gradients of ghosts are none.
  void engine_called() override;

  /// Operators answered by matching since construction, for tests and benchmarks.
  int64_t num_matched() const { return num_matched_; }
  int64_t num_recordings() const { return num_recordings_; }

 private:
  /// A value that the body has brought to the CPU.
  struct HostTensor {
    at::Tensor real;   // what the body holds
    at::Tensor ghost;  // what stands for it in the recording
  };
  /// Memory of such values as operators left it: what the recording knows of.
  struct HostMemory {
    c10::Storage storage;
    at::Tensor bytes;
  };
  /// A value that this run has read, and how many operators had been called then.
  struct EarlierRead {
    partitioner::ValueId value;
    partitioner::NodeId position;
  };
  /// An operator on them.
  struct HostCall {
    torch::jit::Stack real;           // the arguments as the body gave them, later the results
    std::vector<at::Tensor> hosts{};  // among these
    std::vector<at::Tensor> written{};
    bool is_real = true;              // no other tensor is a ghost, or a parameter, whose content may be elsewhere
    bool requires_grad = false;       // as the recording sees the hosts
  };
  using Bucket = std::vector<std::shared_ptr<Recording>>;  // most recently used first

  bool matches_call(const c10::OperatorHandle& op, const torch::jit::Stack& stack);
  bool matches_argument(const c10::IValue& actual, const partitioner::Argument& recorded, int32_t position);
  bool matches_tensor(const at::Tensor& actual, partitioner::ValueId recorded);
  bool matches_copy(const at::Tensor& actual, Ghost& ghost, partitioner::ValueId recorded);
  bool matches_root(const at::Tensor& loss);
  bool matches_constant(const at::Tensor& actual, partitioner::ValueId recorded);
  void answer(torch::jit::Stack& stack);
  at::Tensor hand_out(partitioner::ValueId id);
  std::vector<at::Tensor> tensors_so_far() const;
  void record_or_match(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  at::Tensor ghost_of(const at::Tensor& tensor) const;
  at::Tensor host_of(const at::Tensor& ghost);
  at::Tensor ghost_leaving(const at::Tensor& tensor) const;
  void note_memory(const at::Tensor& real, bool is_written);
  void check_memory(const at::Tensor& real, const std::string& reader) const;
  HostCall take_ghosts(const OperatorInfo& info, torch::jit::Stack& stack) const;
  void finish_host_call(const HostCall& call, size_t first, torch::jit::Stack& stack);
  void update_hosts(const HostCall& call, size_t first, torch::jit::Stack& stack);
  void update_aliases(const std::vector<at::Tensor>& written, const HostCall& call);
  void call_with_hosts(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void skip_synthesised();
  void follow_writes(const RecordedCall& call, const torch::jit::Stack& stack);
  const std::string& current_module() const;
  void check_histories() const;
  bool finish_matched(const std::vector<at::Tensor>& returned);
  void go_back_to_recording();
  bool switch_recording(const std::function<bool()>& goes_on);
  bool take_over(const std::shared_ptr<Recording>& candidate);
  void answer_read(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  bool find_values(const std::vector<at::Tensor>& tensors, std::vector<partitioner::ValueId>& values) const;
  std::vector<at::Tensor> read(const std::vector<at::Tensor>& tensors);
  int32_t memory_of(const at::Tensor& tensor) const;
  ValueRead describe_run() const;
  void forget_least_used();
  CapturedBody finish_recorded(const std::vector<at::Tensor>& returned);

  const Bindings& bindings_;
  std::unordered_map<std::string, Bucket> recordings_;
  std::string key_;
  std::shared_ptr<Recording> matching_;  // null while recording
  GhostRun ghost_run_;
  std::vector<WeakTensor> ghosts_;       // of a matched run, by first value
  std::vector<at::Tensor> written_;      // of these, what operators have written to
  std::vector<at::Tensor> copies_;       // of these, what was made behind the dispatcher
  std::vector<c10::Storage> storages_;   // for these, as Recording::storages
  CapturedBody run_;                     // what differs from matching_ so far
  std::vector<ConstantTensor> used_;     // constants of this run, as they were at their first use
  partitioner::NodeId position_ = 0;
  std::unique_ptr<Recorder> recorder_;
  EqualAnswers equal_;
  std::vector<EarlierRead> reads_;  // beyond what the step's inputs decide
  std::vector<HostTensor> hosts_;
  std::vector<HostMemory> host_memory_;
  std::vector<at::Tensor> losses_;  // given to mark_backward in this run
  std::vector<partitioner::NodeId> loss_positions_;  // how many operators came before
  int64_t num_matched_ = 0, num_recordings_ = 0;
  size_t max_recordings_;
  ValueReader reader_;
  uint64_t num_runs_ = 0;
};

/// Whether a call wants the content of the tensor on the CPU: cpu(), or printing.
bool asks_for_host_copy(const OperatorInfo& info, const torch::jit::Stack& stack);

}  // namespace smp::runtime
