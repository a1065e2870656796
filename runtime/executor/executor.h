// Walks this rank's column of a schedule: receive, compute, send. The one place where stages, boundary and transport meet.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "partitioner/plan/message_rules.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/schedule.h"
#include "runtime/exchange/boundary.h"
#include "runtime/executor/timeline.h"
#include "runtime/stage/stage.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Stages of one program on this rank, ready to run.
struct RankProgram {
  const partitioner::Graph* graph = nullptr;
  const partitioner::Plan* plan = nullptr;
  std::map<int, std::unique_ptr<Stage>> stages;  // by stage index, this rank's only
};

/// One microbatch of a step as the executor sees it.
struct MicrobatchRun {
  RankProgram* program = nullptr;
  MicrobatchContext context;
  std::vector<at::Tensor> inputs;                   // the leader's step arguments by graph input; empty elsewhere
  TensorLookup tensors;                             // parameters, buffers, constants
  std::function<void(int stage)> before_forward{};  // may be empty
};

/// What a message carries: a value, or its gradient in one of the backwards.
struct Carried {
  partitioner::ValueId value = partitioner::kNoValue;
  int backward = 0;
  auto operator<=>(const Carried&) const = default;
};

/// Throws c10::ValueError for a plan whose messages would need more tags than transports have.
void check_number_of_stages(const partitioner::Plan& plan);

/// The number of an edge and direction: the tag of its messages, and its name in the statistics of message buffers.
int channel_of(int source_stage, int target_stage, bool activation);

/// Returned values and losses that were made on this rank, by value, one entry per microbatch.
using RankResults = std::vector<std::map<partitioner::ValueId, at::Tensor>>;

/// Sees each backward before its first operator, and the weight gradients of its microbatch behind their last.
class BackwardObserver {
 public:
  virtual ~BackwardObserver() = default;
  virtual void before_backward(const partitioner::Action& action) = 0;
  virtual void after_weight_gradients(const partitioner::Action& action) = 0;
};

struct RunOptions {
  BackwardObserver* observer = nullptr;
  int loss_divisor = 0;                  // of every loss; 0: the number of microbatches
  TimelineRecorder* recorder = nullptr;  // of the column's actions
};

class Executor {
 public:
  /// `pipeline`: the ranks of one replica, by pipeline rank.
  Executor(Transport& pipeline, BufferPool& buffers) : pipeline_(pipeline), buffers_(buffers) {}

  /// Performs the column of this rank, action by action; microbatches are numbered within `microbatches`, which may be
  /// a part of the step's. After an exception the microbatches in flight are dropped.
  /// Throws CommError and its kin with the action's text; whatever an operator throws.
  RankResults run(const partitioner::Schedule& schedule, std::span<MicrobatchRun> microbatches,
                  const RunOptions& options = {});
  /// The action that it performs, in words: "receive B of microbatch 3 on stage 1, with the gradient of aten::mm of 'head'".
  /// Empty when there is none.
  std::string describe() const;
  /// How long the forwards and backwards since the last call have taken the host.
  int64_t take_computing_ns() { return std::exchange(computing_ns_, 0); }

 private:
  struct Sent {
    Request request;
    std::shared_ptr<MessageBuffer> buffer;  // null: waited for
    int channel;
    bool is_second;  // of a value, behind its header
  };
  struct Expected {
    partitioner::Action action;
    std::vector<Carried> values;
    std::vector<std::shared_ptr<MessageBuffer>> buffers;
    std::vector<Request> requests;
  };
  struct Key {
    int microbatch;
    Carried carried;
    int place;  // the stage that waits for it, or -2 - target for what waits to be sent there
    auto operator<=>(const Key&) const = default;
  };

  int place_for(const partitioner::Plan& plan, int target) const;
  void drop_everything(std::span<MicrobatchRun> microbatches);
  void perform(const partitioner::Action& action, std::span<MicrobatchRun> microbatches);
  void forward(const partitioner::Action& action, MicrobatchRun& run);
  void backward(const partitioner::Action& action, MicrobatchRun& run);
  void backward(const partitioner::Action& action, MicrobatchRun& run, size_t index);
  void send(const partitioner::Action& action, const MicrobatchRun& run);
  void wait_for_room(const partitioner::Action& action, int channel, size_t num_values);
  void receive(const partitioner::Action& action, std::span<MicrobatchRun> microbatches);
  Expected post(const partitioner::Action& action, const MicrobatchRun& run);
  at::Tensor take_activation(int microbatch, partitioner::ValueId value, int stage, const MicrobatchRun& run);
  void reap_sent();

  Transport& pipeline_;
  BufferPool& buffers_;
  RunOptions options_;                               // of this step
  const partitioner::Schedule* schedule_ = nullptr;  // while it runs
  std::span<MicrobatchRun> microbatches_;            // and these two
  const partitioner::Action* action_ = nullptr;
  int64_t computing_ns_ = 0;
  std::deque<Sent> sent_;
  std::deque<Expected> expected_;
  partitioner::ReceivesAhead ahead_;       // what of the column is in expected_, or has been
  std::map<Key, at::Tensor> activations_;  // received or local
  std::map<Key, at::Tensor> gradients_;
  RankResults results_;
};

}  // namespace smp::runtime
