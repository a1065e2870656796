// Captures a step body once per microbatch: recorded the first time, matched afterwards. Owns the recordings, and decides
// who answers an operator.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/capture/equality.h"
#include "runtime/capture/ghosts.h"
#include "runtime/capture/history.h"
#include "runtime/capture/host_values.h"
#include "runtime/capture/interceptor.h"
#include "runtime/capture/matcher.h"
#include "runtime/capture/recorder.h"
#include "runtime/capture/recordings.h"
#include "runtime/capture/replaced_data.h"
#include "runtime/libtorch/arithmetic.h"

namespace smp::runtime {

/// The capture of one step function.
///
///   BodyCapture capture(bindings);
///   auto ghosts = capture.begin(microbatch_arguments, key);
///   { InterceptScope scope(capture);  returned = body(ghosts); }   // the body calls mark_backward(loss)
///   CapturedBody run = capture.finish(returned);
///
/// A run whose operators equal those of an earlier run with the same key is answered from it, without running anything (half
/// a microsecond per operator, dispatcher and ghosts included); at the first difference another recording that began in the
/// same way goes on, else the run goes back to recording. Scalars and constants that differ are part of the CapturedBody,
/// not of the graph.
///
/// A value that the body reads is fetched by the ValueReader; the operators so far are known by then.
class BodyCapture : public Interceptor, private BodyRun {
 public:
  /// Keeps the `max_recordings` used last.
  explicit BodyCapture(const Bindings& bindings, int64_t max_recordings = 64)
      : bindings_(bindings),
        recordings_(max_recordings),
        matcher_(bindings),
        replaced_(bindings),
        equal_(bindings),
        hosts_(bindings, *this) {}

  /// Without one, values cannot be read. cpu_is_read: what follows on tensor.cpu() may be pointers, so it is a read.
  void set_reader(ValueReader reader, bool cpu_is_read = true) {
    reader_ = std::move(reader);
    cpu_is_read_ = cpu_is_read;
  }

  /// `key` tells signatures apart that the geometry of `inputs` does not (training flag, grad mode, …).
  std::vector<at::Tensor> begin(const std::vector<at::Tensor>& inputs, const std::string& key);
  /// A backward of the body starts at `loss`; several run one after the other. The root is the value that `loss` has
  /// now: in-place operators may give it another one later. Throws c10::Error for the same loss again, one that is no
  /// scalar or that requires no gradient.
  void mark_backward(const at::Tensor& loss);
  /// A copy of what a ghost, a parameter or a buffer holds now; of others, undefined. Called with the capture key excluded.
  at::Tensor look_at(const at::Tensor& tensor);
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
  /// A backward of this run, and how many operators had been called when it was marked.
  struct Root {
    at::Tensor loss;
    partitioner::NodeId position;
  };
  /// A value that this run has read, and how many operators had been called then.
  struct EarlierRead {
    partitioner::ValueId value;
    partitioner::NodeId position;
  };

  void record_or_match(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  std::vector<at::Tensor> read(const std::vector<at::Tensor>& tensors) override;
  int32_t memory_of(const at::Tensor& tensor) const override;
  const GhostRun& ghost_run() const override { return ghost_run_; }
  const std::string& current_module() const override {
    return recorder_ ? recorder_->recording().module() : matcher_.match().module();
  }

  partitioner::NodeId position() const { return recorder_ ? recorder_->recording().next_node() : matcher_.match().position; }
  void match_or_record(const std::function<bool()>& matches);
  void record_replaced();
  at::Tensor known_value(const Recorder& recorder, const at::Tensor& tensor) const;
  void answer_read(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  ValueRead describe_run() const;
  void go_back_to_recording();
  CapturedBody finish_recorded(const std::vector<at::Tensor>& returned);
  void check_arithmetic(const std::string& op) const;

  const Bindings& bindings_;
  Recordings recordings_;
  std::string key_;
  ArithmeticSwitches switches_;  // when the body began
  Training training_{bindings_};
  GhostRun ghost_run_;
  Matcher matcher_;                     // of a run that has equalled a recording so far
  std::unique_ptr<Recorder> recorder_;  // of any other; null while the run matches
  std::vector<Root> roots_;
  std::vector<EarlierRead> reads_;  // beyond what the step's inputs decide
  ReplacedData replaced_;
  EqualAnswers equal_;
  HostValues hosts_;
  ValueReader reader_;
  bool cpu_is_read_ = true;
  int64_t num_matched_ = 0, num_recordings_ = 0;
};

}  // namespace smp::runtime
