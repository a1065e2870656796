// The one global of the library: the context of this rank, a thread-local pointer with a process default.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/exchange/boundary.h"
#include "runtime/exchange/calls.h"
#include "runtime/launch/launch.h"
#include "runtime/placement/topology.h"
#include "runtime/transport/transport.h"
#include "smp/config.h"
#include "smp/engine/context/log.h"
#include "smp/engine/context/manual_placement.h"
#include "smp/engine/context/rank_device.h"
#include "smp/options.h"

namespace smp::runtime {
class BodyCapture;
}

namespace smp::engine {

class MadeGroups;
class StepTimeline;
struct RankState;

/// The step objects of one rank, by number.
struct StepNumbers {
  int num_made = 0;
  std::vector<int> ended;  // that no object has any more, and that the conductor has not forgotten yet
};

/// A join in progress.
struct JoinState {
  JoinOptions options{};
  uint64_t num_steps = 0;        // of this replica in it
  bool has_ended_early = false;  // for all replicas, as throw_on_early_termination asks
};

/// A typical step that Config::timeline has recorded.
struct TimelineDrawing {
  std::string text, svg;
};

/// How long a rank waits for another one, while one of them plans, measures or writes, as until the first step has ended.
std::chrono::milliseconds long_timeout(const Config& config);

/// Everything one rank owns besides the user's objects.
struct Context {
  Context(Config resolved, const runtime::Launch& launch, std::shared_ptr<runtime::Transport> world);
  ~Context();

  Config config;  // resolved; pipeline_parallel_degree is never 0 here
  runtime::Launch launch;
  RankDevice device;  // what this rank computes on
  runtime::Topology topology;
  std::shared_ptr<runtime::Transport> world, pipeline, replicas, shards;
  std::shared_ptr<runtime::Transport> joined;  // the world as it was joined: what moves the host's memory alone is staged
  runtime::Calls calls;                        // that ranks are in
  bool replicas_share_memory = false;          // until the groups are known: all ranks do
  std::optional<JoinState> join;               // within it replicas may be at different steps
  bool is_in_step = false;                     // and yet they are not
  bool has_started = false;                    // a step has ended
  std::set<int> begun_steps;                   // numbers of step functions that were called
  std::string_view call = {};                  // that this rank is in with others
  int64_t in_calls_ns = 0;                     // how long it has been in those that have ended
  bool is_laid_out = true;  // false: the first step will say how many ranks form a pipeline; one of all ranks until then
  std::shared_ptr<MadeGroups> made_groups;  // by new_group
  runtime::BufferPool buffers;
  Logger logger;
  ManualPlacement manual_placement;
  std::vector<WeakTensor> spread_tensors;  // over a pipeline, by models that are gone; their data are not whole anywhere
  std::shared_ptr<RankState> rank_state;   // of the models and of a join, once there is one
  runtime::BodyCapture* body_in_progress = nullptr;  // the capture of the step body that runs right now
  std::shared_ptr<StepNumbers> steps = std::make_shared<StepNumbers>();
  int64_t num_graphs = 0;                  // that programs were made of
  std::shared_ptr<StepTimeline> timeline;  // null: none was asked for, or it has been written
  TimelineDrawing timeline_drawing;        // on world rank 0, once it has been written

  runtime::Transport& group(runtime::GroupKind which) const;
  /// Forms the groups anew, with pipelines of `pipeline_ranks`. Collective over the world.
  void lay_out(int pipeline_ranks);
  /// Throws c10::Error naming `caller` as long as groups of that kind are not known.
  void check_laid_out(runtime::GroupKind which, const char* caller) const;

 private:
  void form_groups();
};

/// While one lives, waits may take long_timeout; behind it Config::timeout_s, once a step has ended.
class LongWaits {
 public:
  explicit LongWaits(const Context& context);
  ~LongWaits();
  LongWaits(const LongWaits&) = delete;
  LongWaits& operator=(const LongWaits&) = delete;

 private:
  const Context& context_;
};

/// This rank's context. Throws c10::Error naming `caller` before smp::init.
Context& context(const char* caller);
/// Null before smp::init.
Context* try_context();
/// Ends the refusals of context() in this process, in place of how to call smp::init.
void explain_absence(std::string text);

/// Throws c10::ValueError naming `caller` when a step body runs on this rank: the body runs on one rank only, on tensors
/// without data, so what concerns all ranks or real values cannot be done there. The step refuses it on every rank.
/// `fix` ends the text; without one it is to call on every rank, before or after the step function.
void refuse_in_body(std::string_view caller);
void refuse_in_body(std::string_view caller, std::string_view fix);

/// Throws c10::ValueError naming `caller` in the loop of smp::join, where replicas need not be at the same step.
void refuse_in_join(std::string_view caller);

/// Makes `context` the default of the process (null: none).
void set_process_context(std::shared_ptr<Context> context);
/// While it lives, this thread is the rank of `context`: helper threads, and tests with ranks as threads.
class ThreadContext {
 public:
  explicit ThreadContext(Context* context);
  ~ThreadContext();
  ThreadContext(const ThreadContext&) = delete;
  ThreadContext& operator=(const ThreadContext&) = delete;

 private:
  Context* previous_;
};

}  // namespace smp::engine
