// Bodies in order, forwards ahead of them, and one way out for every refusal.
#include "smp/engine/step/leader.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

#include "partitioner/graph/graph_io.h"
#include "partitioner/plan/plan_io.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/libtorch/unmade.h"
#include "smp/engine/arguments/argument_memory.h"
#include "smp/engine/arguments/local_values.h"
#include "smp/engine/arguments/run_body.h"
#include "smp/engine/arguments/split.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/planning/auto_layout.h"
#include "smp/engine/replicas/replica_gradients.h"
#include "smp/engine/step/captured_runs.h"

namespace smp::engine {

using namespace partitioner;
using runtime::CapturedBody;
using runtime::Round;
using runtime::StepMessage;
using runtime::ValueRead;

namespace {

bool is_value_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError&) {
    return true;
  } catch (...) {
    return false;
  }
}

bool same_sizes(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const at::Tensor& one, const at::Tensor& other) {
    return one.defined() == other.defined() && (!one.defined() || one.sizes() == other.sizes());
  });
}

bool same_arguments(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return same_sizes(a, b) && std::equal(a.begin(), a.end(), b.begin(), [](const at::Tensor& one, const at::Tensor& other) {
           return !one.defined() || (one.scalar_type() == other.scalar_type() && one.strides() == other.strides());
         });
}

}  // namespace

step_internal::Results Leader::lead() {
  StepMessage message = new_message(Round::kWhole, 0);
  forgotten_ = rank_.programs.forget_least_used(static_cast<size_t>(rank_.context.config.max_cached_graphs));
  std::exception_ptr own_error;
  try {
    capture_bodies();
    check_goes_on();
    check_same_returns(bodies_);
    const bool trains = std::any_of(bodies_.begin(), bodies_.end(),
                                    [](const CapturedBody& body) { return body.recording->graph.has_backward(); });
    check_random_stream(trains);
    if (ahead_ == Ahead::kNone) {
      std::vector<Program*> programs;
      for (const CapturedBody& body : bodies_) programs.push_back(&add_microbatch(body, message));
      rounds_.prove_table(programs);
    } else {
      forward_until(bodies_.size(), bodies_.back());
      rounds_.check_writes();
      leave_out_dropped();
      message = new_message(Round::kFinish, bodies_.size());
    }
    message.trains = trains;
    if (call_.values) message.values = call_.values();
    if (message.values.size() == 1 && may_repeat_first_body()) message.values.resize(bodies_.size(), message.values.front());
    TORCH_CHECK_VALUE(message.values.empty() || message.values.size() == bodies_.size(),
                      "step: expected a value for each of ", bodies_.size(), " microbatches, got ", message.values.size(),
                      ".");
    const std::string payload = call_.payload ? call_.payload() : "";
    if (payload != rank_.programs.find(bodies_.front().recording->hash)->payload) message.payload = payload;
  } catch (...) {  // of any type: the others wait for this message
    own_error = std::current_exception();
    message.error = runtime::describe_exception(own_error);
    message.is_value_error = is_value_error(own_error);
  }
  if (failure_) std::rethrow_exception(failure_);
  meet_replicas(message, /*is_last=*/true);
  if (!message.error.empty()) {
    refuse(message);
    if (own_error) std::rethrow_exception(own_error);
    throw_refusal(message);
  }
  return *lead_round(message);
}

MicrobatchInputs Leader::split() {
  const step_internal::Share share = share_of(rank_, step_number_, call_);
  arguments_ = call_.arguments(share);
  std::vector<step_internal::StepTensor> arguments = arguments_;
  // Parts may stay in the argument's memory, and an operator that writes to a buffer would change them there.
  const auto leave_buffers = [this](at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return;
    if (rank_.models.bindings().find_storage(tensor) != nullptr) tensor = tensor.detach().clone();
  };
  for (auto& argument : arguments) {
    leave_buffers(argument.tensor);
    for (at::Tensor& piece : argument.pieces) leave_buffers(piece);
  }
  return split_arguments(arguments, share);
}

void Leader::capture_bodies() {
  inputs_ = split();
  auto& capture = rank_.captures[step_number_];
  if (!capture) {
    capture = std::make_unique<runtime::BodyCapture>(rank_.models.bindings(), rank_.context.config.max_cached_graphs);
  }
  capture->set_reader([this](const ValueRead& wanted) { return read(wanted); }, call_.cpu_is_read);
  const std::string key = rank_.models.training_flags();
  HeldGradients gradients(rank_.models.bindings());
  for (size_t m = 0; m < inputs_.size(); ++m) {
    if (m == 1 && may_repeat_first_body()) {
      bodies_.resize(inputs_.size(), bodies_.front());
      break;
    }
    bodies_.push_back(run_body(rank_.context, *capture, call_, inputs_[m], key, m));
    if (m >= assumed_.size() || same_run(assumed_[m], bodies_[m])) continue;
    assumed_.resize(m);
    ahead_ = Ahead::kOneByOne;
  }
  TORCH_CHECK_VALUE(
      gradients.put_back() == 0,
      "step: expected a body that leaves gradients as they are, got one that has cleared or replaced some (zero_grad). "
      "Backwards run when all bodies have ended, on every rank. Clear gradients before the step function is called.");
}

bool Leader::may_repeat_first_body() const {
  return rank_.context.config.bodies == Bodies::kAlike && !has_read_ && !(call_.differ && call_.differ()) &&
         std::all_of(inputs_.begin(), inputs_.end(),
                     [this](const auto& inputs) { return same_arguments(inputs, inputs_.front()); });
}

void Leader::check_goes_on() const {
  if (failure_) std::rethrow_exception(failure_);
  if (refusal_) throw_refusal(*refusal_);
}

std::vector<at::Tensor> Leader::read(const ValueRead& wanted) {
  const size_t m = bodies_.size();
  has_read_ = true;
  check_goes_on();
  if (wanted.is_local) {
    return compute_locally(wanted, *runtime::local_slice(wanted.graph, wanted.num_nodes, wanted.values), inputs_[m],
                           rank_.models.bindings(), {});
  }
  const CapturedBody now{.recording = wanted.matched, .scalars = wanted.scalars, .constants = wanted.changed_constants};
  if (wanted.matched == nullptr) {
    if (auto values = probe(wanted)) return std::move(*values);
  } else if (m >= assumed_.size() || !same_run(so_far(wanted, assumed_[m]), now)) {
    assumed_.resize(std::min(assumed_.size(), m));
    forward_until(ahead_ == Ahead::kOneByOne ? m + 1 : inputs_.size(), now);
  }
  std::vector<at::Tensor> values;
  for (ValueId id : wanted.values) values.push_back(rounds_.value(m, id));
  return values;
}

// The rest of the body is not known, so nothing of this run can be kept. Returns values that were computed on this rank.
std::optional<std::vector<at::Tensor>> Leader::probe(const ValueRead& wanted) {
  const size_t m = bodies_.size();
  // Also a body that trains may read without gradients.
  const auto makes_gradients = [&](const Node& node) {
    return node.grad_enabled && std::any_of(node.outputs.begin(), node.outputs.end(), [&](ValueId id) {
             return id != kNoValue && wanted.graph.values[static_cast<size_t>(id)].spec.requires_grad;
           });
  };
  const bool has_gradients =
      at::GradMode::is_enabled() || std::any_of(wanted.graph.nodes.begin(), wanted.graph.nodes.end(), makes_gradients);
  const bool trains = has_gradients && rank_.models.training_flags().find('t') != std::string::npos;
  if (!trains_) trains_ = trains;
  if (all_here(wanted) && m == 0) {
    begin_ahead();
    std::vector<NodeId> nodes(static_cast<size_t>(wanted.num_nodes));
    for (NodeId n = 0; n < wanted.num_nodes; ++n) nodes[static_cast<size_t>(n)] = n;
    const uint64_t step = *trains_ ? rank_.training_steps : rank_.evaluation_steps;
    return compute_locally(wanted, nodes, inputs_[m], rank_.models.bindings(),
                           random_state(rank_, *trains_, step, m, inputs_.size()));
  }
  if (m > 0) forward_until(m, bodies_.back());
  assumed_.resize(std::min(assumed_.size(), m));  // the probe takes the place of what ran ahead
  auto recording = std::make_shared<runtime::Recording>();
  recording->graph = wanted.graph;
  recording->graph.read = wanted.values;
  recording->graph.returned.clear();
  recording->graph.backward_roots.clear();
  for (const auto& constant : wanted.constants) {
    recording->constants.push_back({constant.value, constant.tensor, constant.tensor});
  }
  recording->hash = partitioner::hash(recording->graph);
  StepMessage message = new_message(Round::kProbe, m);
  add_microbatch({.recording = recording, .scalars = {}, .constants = {}}, message);
  meet_replicas(message, /*is_last=*/false);
  lead_round(message);
  return {};
}

// Before the first step of a model its values may still differ between ranks; from here on they do not.
void Leader::begin_ahead() {
  if (ahead_ != Ahead::kNone || rank_.models.are_alike()) return;
  ahead_ = Ahead::kAll;
  StepMessage message = new_message(Round::kForward, 0);
  meet_replicas(message, /*is_last=*/false);
  lead_round(message);
}

// Nothing that the run needs has been placed or put off, so every rank holds it.
bool Leader::all_here(const ValueRead& wanted) const {
  const std::set<std::string> elsewhere = rank_.models.placed_or_delayed();
  return std::none_of(wanted.graph.values.begin(), wanted.graph.values.end(),
                      [&](const Value& value) { return is_named(value) && elsewhere.contains(value.name); });
}

// Forwards of the microbatches before `end` that have not run: those of bodies that have ended, and of later ones as far as
// their arguments have the sizes of the next body's, taken to be like `current`.
void Leader::forward_until(size_t end, const CapturedBody& current) {
  const size_t first = assumed_.size();
  if (first >= end) return;
  if (ahead_ == Ahead::kNone) ahead_ = Ahead::kAll;
  if (!trains_) trains_ = current.recording->graph.has_backward();
  StepMessage message = new_message(Round::kForward, first);
  const size_t next = bodies_.size();
  for (size_t m = first; m < end && (m <= next || same_sizes(inputs_[m], inputs_[next])); ++m) {
    assumed_.push_back(m < next ? bodies_[m] : current);
    add_microbatch(assumed_.back(), message);
  }
  meet_replicas(message, /*is_last=*/false);
  lead_round(message);
}

// Programs that ran ahead and that no body has become place nothing. Where one of them would have, all of them go, because
// they are planned for that placement.
void Leader::leave_out_dropped() {
  const auto is_used = [this](uint64_t hash) {
    return std::any_of(bodies_.begin(), bodies_.end(), [hash](const auto& body) { return body.recording->hash == hash; });
  };
  runtime::TensorHomes homes = rank_.models.homes();
  for (uint64_t hash : added_) {
    const std::shared_ptr<Program> program = rank_.programs.find(hash);
    if (is_used(hash)) homes = rank_.models.homes_after(program->graph, program->plan, homes);
  }
  if (homes == planned_) return;
  planned_ = std::move(homes);
  for (uint64_t hash : added_) {
    if (is_used(hash)) continue;
    rank_.programs.erase(hash);
    forgotten_.push_back(hash);
  }
}

void Leader::check_random_stream(bool trains) const {
  if (!trains_ || *trains_ == trains) return;
  const bool draws =
      std::any_of(bodies_.begin(), bodies_.end(), [](const CapturedBody& body) { return has_random(*body.recording); });
  TORCH_CHECK_NOT_IMPLEMENTED(
      !draws,
      "step: expected a body that reads values and draws random numbers (dropout) to be either "
      "training or evaluation, got one that ",
      *trains_ ? "looked like training" : "looked like evaluation", " when it read and turned out to be ",
      trains ? "training" : "evaluation",
      ". Evaluate under torch::NoGradGuard, with model.eval() where dropout is to rest. In a training "
      "step let all microbatches call backward(), and read what is computed without gradients behind "
      "the first operator that makes some.");
}

// What may not differ between ranks in a training step.
void Leader::describe_training(StepMessage& message) const {
  std::vector<std::shared_ptr<Program>> programs;  // each once: bodies that are alike have one recording
  const runtime::Recording* last = nullptr;
  for (const CapturedBody& body : bodies_) {
    if (body.recording.get() == last) continue;
    last = body.recording.get();
    programs.push_back(rank_.programs.find(last->hash));
  }
  message.error = hook_on_parts(programs, rank_.models.bindings());
  message.reduced = reductions(rank_.models, programs);
  if (rank_.context.world->size() == 1) return;
  message.settings = settings_of(rank_.models);
  message.optimizers = describe_optimizers(rank_);
}

void Leader::meet_replicas(StepMessage& message, bool is_last) {
  if (is_last && message.trains && message.error.empty()) describe_training(message);
  if (!meeting_.is_due(is_last)) return;
  or_fail([&] { meeting_.meet(message, is_last, planned_); });
  if (!is_last && !message.error.empty()) {
    refusal_ = message;
    throw_refusal(message);
  }
  if (!is_last || !meeting_.comes_again()) return;
  // Another replica reads. This one begins with it, and then waits for how that ends.
  StepMessage begin = message;
  begin.round = Round::kForward;
  begin.microbatches.clear();
  lead_round(begin);
  message.new_programs.clear();
  meet_replicas(message, /*is_last=*/true);
}

StepMessage Leader::new_message(Round round, size_t first) const {
  StepMessage message = meeting_.new_message(round);
  message.first = static_cast<int32_t>(first);
  message.num_microbatches = static_cast<int32_t>(inputs_.size());
  message.trains = trains_.value_or(false);
  return message;
}

// Models are placed at the end of a step whose body reads, and values that were put off are made where they are placed.
void Leader::check_made(const Graph& graph) const {
  for (const Value& value : graph.values) {
    if (!is_named(value) || rank_.models.homes().contains(value.name)) continue;
    const runtime::NamedTensor* named = rank_.models.bindings().find_named(value.name);
    TORCH_CHECK_NOT_IMPLEMENTED(
        named == nullptr || !runtime::is_unmade(named->tensor),
        "step: expected the first step of a model with delayed parameters to read no values in its body, got one that does; "
        "'",
        value.name,
        "' has no values yet. Return what you want to know from the body in this step, or run a step without reads first.");
  }
}

Program& Leader::add_microbatch(const CapturedBody& body, StepMessage& message) {
  const runtime::Recording& recording = *body.recording;
  if (message.round != Round::kWhole) check_made(recording.graph);
  const std::shared_ptr<Program> known = rank_.programs.find(recording.hash);
  Program& program = known ? *known : add_program(recording, message);
  check_argument_memory(arguments_, program.graph, program.written_inputs, body.outside, rank_.models.bindings());
  runtime::MicrobatchProgram microbatch{.hash = recording.hash, .scalars = body.scalars, .constants = body.constants};
  add_own_constants(recording, program, microbatch);
  message.num_microbatches = static_cast<int32_t>(inputs_.size());
  message.microbatches.push_back(std::move(microbatch));
  return program;
}

Program& Leader::add_program(const runtime::Recording& recording, StepMessage& message) {
  Plan plan = rank_.programs.make_plan(recording.graph, planned_, static_cast<int>(inputs_.size()));
  const bool is_whole = message.round != Round::kProbe;
  runtime::TensorHomes homes = rank_.models.homes_after(recording.graph, plan, planned_,
                                                        is_whole ? Placement::kWholeModels : Placement::kUsedTensors);
  check_dense_gradients(recording, [&](const std::string& parameter) {
    const auto home = homes.find(parameter);
    return rank_.context.replicas->size() > 1 || (home != homes.end() && home->second.is_tied());
  });
  planned_ = std::move(homes);
  runtime::NewProgram fresh{.hash = recording.hash, .graph = {}, .plan = {}, .constants = {}};
  if (rank_.context.pipeline->size() > 1) {
    fresh.graph = serialise(recording.graph);
    fresh.plan = serialise(plan);
  }
  const auto program = rank_.programs.add(recording.graph, std::move(plan), recording.hash);
  for (const runtime::ConstantTensor& constant : recording.constants) {
    fresh.constants.push_back({constant.value, program->constants[constant.value] = constant.content});
  }
  added_.push_back(recording.hash);
  message.new_programs.push_back(std::move(fresh));
  return *program;
}

std::optional<step_internal::Results> Leader::lead_round(StepMessage& message) {
  send(message);
  return or_fail([&] { return rounds_.perform_round(message, inputs_); });
}

void Leader::send(StepMessage& message) {
  message.forgotten = std::exchange(forgotten_, {});  // once: a program may be made anew in the same step
  tell_followers(rank_, message);
}

// All ranks forget the step's new programs: they were planned for a placement that never was.
void Leader::refuse(StepMessage& message) {
  for (uint64_t hash : added_) rank_.programs.erase(hash);
  forgotten_.insert(forgotten_.end(), added_.begin(), added_.end());
  message.new_programs.clear();
  message.microbatches.clear();
  rounds_.drop_from(0);
  if (rank_.context.join && rank_.context.join->has_ended_early) message.round = Round::kJoined;
  send(message);
}

}  // namespace smp::engine
