// The engine as a language calls it, beside smp::init, smp/process_group.h and smp/config.h, which need no types of a
// language: models, optimizers, steps, joins, and how a rank fails. Below it nobody knows how modules, optimizers and
// functions of a language look; above it nobody knows of plans, programs and messages.
//
// Calls belong to the rank of the calling thread. They throw c10::Error before smp::init, and where they concern all ranks
// or real values, c10::ValueError within a step body, which runs on one rank and without data.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "smp/engine/context/hooks.h"
#include "smp/engine/context/log.h"
#include "smp/engine/model_view.h"
#include "smp/engine/optimizer_view.h"
#include "smp/hooks.h"
#include "smp/optimizer_state.h"
#include "smp/options.h"
#include "smp/state_dict.h"
#include "smp/step_call.h"

namespace smp::engine {

struct Model;      // one wrapped model
struct Optimizer;  // of one model

// Start. smp::init does the rest (smp/init.h).

/// smp::init where it has been called before, with the keys that the JSON object `text` names.
void init_again(std::string_view text);
/// Ends the refusal of what is called before smp::init, in place of how to call that: why this process cannot.
void explain_absence(std::string text);

// Models. What they do is told in smp/distributed_model.h, under the same names.

std::shared_ptr<Model> add_model(std::shared_ptr<const ModelView> view, const ModelOptions& options);
/// When its last handle goes. Forgets everything recorded so far: recordings may hold the model's tensors.
void remove_model(const Model& model);
/// Before a model's forward. Throws c10::Error outside of a step body.
void check_in_body(const Model& model);
/// In a body: `loss` is what is differentiated.
void mark_backward(const at::Tensor& loss);
/// In a body: calls look with a copy of what the tensor holds, the microbatch's as far as the body has come; operators are
/// not captured within. In a scope of delayed construction likewise. False for tensors that hold it themselves, and outside
/// of both. Throws for one of a body that has ended.
bool look_at(const at::Tensor& tensor, const std::function<void(const at::Tensor& content)>& look);
bool is_in_body();
/// Throws c10::ValueError in a body.
void refuse_in_body(std::string_view caller);
/// Whether an operator that this thread calls now would be captured.
bool is_capturing();
/// Before LibTorch's autograd engine runs, where a language does not take the process's default one. Throws within a body.
void autograd_called();
bool is_partitioned(const Model& model);
/// fix: the way out that a refusal within a body names.
std::vector<std::pair<std::string, at::Tensor>> local_named_parameters(const char* caller, const Model& model,
                                                                       std::string_view fix);
/// Buffers likewise.
std::vector<std::pair<std::string, at::Tensor>> local_named_buffers(const char* caller, const Model& model,
                                                                    std::string_view fix);
StateDict state_dict(const Model& model);
StateDict local_state_dict(const Model& model);
void load_state_dict(Model& model, const StateDict& state, bool strict);
void zero_grad(const Model& model);
void register_comm_hook(Model& model, CommHook hook);
HookHandle add_hook(const char* caller, const Model& model, Moment moment, Hook hook);
/// Between the two, steps keep the model's gradients to their replica. On every rank alike; they nest.
void begin_no_sync(Model& model);
void end_no_sync(Model& model);
/// What this rank computes on, "cpu" or "cuda"; before init "cpu".
std::string device_type();
/// Ranks of this host, as the launcher says; before init too.
int launched_local_size();
/// Scales the model's gradients down to a global norm of at most `max_norm`; returns what it was. Collective over the
/// pipeline.
double clip_grad_norm(Model& model, double max_norm, double norm_type);
void check_replicas(const Model& model);
std::string plan_text(const Model& model);
std::string plan_json(const Model& model);
double predicted_step_s(const Model& model);
std::vector<int64_t> predicted_peak_bytes(const Model& model);

/// Before the first step: these tensors go to that stage. Throws c10::ValueError for a stage that there is not, and
/// c10::Error for tensors that have been placed.
void set_partition(const std::vector<at::Tensor>& tensors, int stage);
/// smp::ActivationCheckpointingGuard. What a body calls between the two is a recompute region; they nest as one. `group`
/// other than 0: part of the region before, if that has the same group and this does not begin it.
void enter_recompute_region(int64_t group = 0, bool begins = true);
void leave_recompute_region();
/// smp::set_activation_checkpointing. `module`: for texts.
void mark_for_recomputation(const std::string& module, const std::vector<at::Tensor>& parameters);
/// smp::DelayParamInitialization for a language that hides from LibTorch's dispatcher how it makes tensors of literals, as
/// Python does.
class DelayedConstruction {
 public:
  DelayedConstruction();
  ~DelayedConstruction();
  DelayedConstruction(const DelayedConstruction&) = delete;
  DelayedConstruction& operator=(const DelayedConstruction&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};
/// False for tensors made under smp::DelayParamInitialization, until they get their values.
bool has_values(const at::Tensor& tensor);
/// Gives tensors made under smp::DelayParamInitialization their values.
void make_values(const std::vector<at::Tensor>& tensors);

// Optimizers: smp/distributed_optimizer.h.

/// Throws c10::ValueError where the view updates what the model does not have.
std::shared_ptr<Optimizer> add_optimizer(std::unique_ptr<OptimizerView> view, const std::shared_ptr<Model>& model);
/// Another one over the same parameters, for its options and state: it counts for nothing else, and takes over at once what
/// is loaded.
std::shared_ptr<Optimizer> stand_in(std::unique_ptr<OptimizerView> view, const Optimizer& optimizer);
/// Before each update, on all ranks: takes over what was loaded and counts. False: this update is left out
/// (Config::nonfinite). `has_finite_gradients`: the caller has seen to it on all ranks, whatever the loss, as loss scalers
/// do.
bool begin_update(Optimizer& optimizer, bool has_finite_gradients = false);
/// After that: `update` calls the optimizer's own step. The first updates of one that is not known to be elementwise are
/// watched: where parameters of several ranks would go into one result, all throw c10::ValueError and nothing has changed.
void run_update(Optimizer& optimizer, const std::function<void()>& update);
/// For a language that reads values without an operator, as Python's tolist() does: the updates that are watched learn of
/// it.
void values_read(const at::Tensor& tensor, const std::string& reader);
OptimizerState state_dict(Optimizer& optimizer);
OptimizerState local_state_dict(Optimizer& optimizer);
void load_state_dict(Optimizer& optimizer, const OptimizerState& state);
/// For a language whose dictionaries hold more than OptimizerState: what the ranks of the pipeline have together, tensors by
/// any names, collective over it; and the state of what lives elsewhere goes, once there is such a thing.
OptimizerEntries gathered_entries(const OptimizerEntries& entries);
void forget_state_of_others(Optimizer& optimizer);
/// Forgets the gradients of what it updates.
void zero_grad(const Optimizer& optimizer);

// Steps: smp/step.h.

step_internal::Results call_step(int step_number, const step_internal::Call& call);
/// Graphs that steps have made on this rank.
int64_t num_graphs();

/// Text and SVG of a typical step, on world rank 0 once Config::timeline has been written; empty else (docs/timeline.md).
std::pair<std::string, std::string> timeline_drawing();

// Joins: smp/join.h. Between the two a language runs its loop; what leaves it in between, it reports and hands on.

void begin_join(const JoinOptions& options);
void end_join();
/// The loop ended with this exception. The others wait, so this ends the job: their calls throw its text.
void abandon_join(const std::exception_ptr& exception);

/// A failure that nobody handles, by whoever catches it last: tells the other ranks, prints "[rank R] <message>" unless
/// another rank has failed before and prints its own, and returns the exit code for this process, which is to end now.
int report_failure(const std::exception_ptr& exception);
/// For a language that knows more of where a rank hangs: add(file) installs a handler of SIGURG that writes to `file`, as
/// Python's faulthandler does. Not called where nobody will ask.
void answer_with_stack(const std::function<void(int file)>& add);

// Log messages go to stderr, or where set_log_sink (smp/engine/context/log.h) says.

}  // namespace smp::engine
