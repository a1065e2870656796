// One step's way: capture on the leader, message to the followers, execution, results.
#include "smp/detail/conductor.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "partitioner/graph/graph_io.h"
#include "partitioner/plan/plan_io.h"
#include "runtime/reducer.h"
#include "runtime/tags.h"
#include "runtime/watch/root_cause.h"
#include "smp/detail/replica_gradients.h"
#include "smp/detail/replica_step.h"
#include "smp/detail/results.h"
#include "smp/detail/split.h"

namespace smp::detail {

using namespace partitioner;
using runtime::StepMessage;

namespace {

constexpr uint64_t kEvaluationStream = uint64_t{1} << 63;  // numbers of training steps never come so far

// Step functions with one graph share its program; where this one has other constants, they travel.
void add_own_constants(const runtime::Recording& recording, const Program& program,
                       runtime::MicrobatchProgram& microbatch) {
  for (const runtime::ConstantTensor& constant : recording.constants) {
    const auto& sent = microbatch.constants;
    const bool overridden =
        std::any_of(sent.begin(), sent.end(), [&](const auto& other) { return other.value == constant.value; });
    const at::Tensor& known = program.constants.at(constant.value);
    const at::Tensor& own = constant.recorded();
    if (overridden || own.is_same(known) || runtime::same_content(own, known)) continue;
    microbatch.constants.push_back({constant.value, own});
  }
}

// A step returns one tensor per microbatch and position.
void check_same_returns(const std::vector<runtime::CapturedBody>& bodies) {
  const size_t count = bodies.front().recording->graph.returned.size();
  for (size_t m = 0; m < bodies.size(); ++m) {
    const size_t other = bodies[m].recording->graph.returned.size();
    TORCH_CHECK_VALUE(other == count, "step: expected the body to return the same number of tensors for every "
                      "microbatch, got ", count, " for microbatch 0 and ", other, " for ", m,
                      ". Return a tensor of zeros where there is nothing to return.");
  }
}

bool is_value_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::ValueError&) {
    return true;
  } catch (...) {
    return false;
  }
}

[[noreturn]] void throw_refusal(const StepMessage& message) {
  if (message.is_value_error) TORCH_CHECK_VALUE(false, message.error);
  TORCH_CHECK(false, message.error);
}

}  // namespace

Conductor& conductor(const char* caller) {
  Context& own = context(caller);
  TORCH_CHECK(own.conductor != nullptr, caller, ": expected a DistributedModel, got none. Wrap the module first: ",
              "smp::DistributedModel model(net);");
  return *own.conductor;
}

Conductor::Conductor(Context& context)
    : context_(context),
      models_(context),
      programs_(context, models_),
      executor_(*context.pipeline, context.buffers) {}

std::shared_ptr<Model> Conductor::add_model(std::shared_ptr<torch::nn::Module> module, const std::string& name) {
  return models_.add(std::move(module), name);
}

void Conductor::remove_model(const Model& model) {
  models_.remove(model);
  captures_.clear();
  programs_.clear();
}

std::vector<StepOutput> Conductor::run_step(int step_number, const step_internal::Call& call) {
  TORCH_CHECK(body_in_progress_ == nullptr, "step: expected a call outside of step bodies, got one from within a body. "
              "Call the step functions one after the other, or share a plain function between their bodies.");
  const bool leads = context_.pipeline->rank() == 0;
  Captured captured;
  const StepMessage message = leads ? lead(step_number, call, captured) : receive_message();
  try {
    if (!leads) accept(message, step_number);
    return execute(message, leads ? &captured : nullptr);
  } catch (...) {
    // The others are in the middle of this step and would wait for ever, should the caller go on.
    context_.world->abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
}

void Conductor::place(const std::shared_ptr<Program>& program) {
  const auto placed = models_.to_place(program->graph);
  for (const auto& model : placed) model->hooks->call(Moment::kBeforePartition);
  models_.place(program);
  for (const auto& model : placed) model->hooks->call(Moment::kAfterPartition);
}

std::vector<StepOutput> Conductor::execute(const StepMessage& message, Captured* captured) {
  std::vector<runtime::MicrobatchRun> runs = prepare(message, captured);
  for (const auto& microbatch : message.microbatches) {
    const auto program = programs_.find(microbatch.hash);
    if (models_.needs_placement(program->graph, models_.owners())) place(program);
  }
  const Schedule& schedule = schedule_of(message);
  const bool is_training = trains(message);
  broadcast_buffers();
  std::optional<runtime::TiedGradients> tied;
  std::optional<ReplicaGradients> gradients;
  runtime::RunOptions options;
  if (is_training) {
    tied.emplace(models_.owners(), models_.bindings(), *context_.pipeline);
    gradients.emplace(context_, models_, message.reduced);
    gradients->begin(schedule.columns[static_cast<size_t>(context_.pipeline->rank())], runs);
    options.observer = &*gradients;
    if (!models_.all().front()->reduction.averages_microbatches) options.loss_divisor = 1;
  }
  runtime::RankResults results = executor_.run(schedule, runs, options);
  std::vector<StepOutput> returned = exchange_results(runs, std::move(results), *context_.pipeline);
  if (is_training) {
    tied->finish();
    gradients->finish();
    count_pass(models_, message.reduced);
    ++training_steps_;
  } else {
    ++evaluation_steps_;
  }
  return returned;
}

StepMessage Conductor::lead(int step_number, const step_internal::Call& call, Captured& captured) {
  StepMessage message{
      .step_function = step_number, .step = training_steps_, .evaluation_step = evaluation_steps_, .reduced = reductions(models_)};
  std::exception_ptr own_error;
  try {
    captured = capture(step_number, call);
    check_same_returns(captured.bodies);
    add_programs(captured, message);
    schedule_of(message);
  } catch (...) {  // of any type: the others wait for this message
    own_error = std::current_exception();
    message.error = runtime::describe_exception(own_error);
    message.is_value_error = is_value_error(own_error);
  }
  agree_with_replicas(message);
  if (!message.error.empty()) {
    // Followers never hear of these programs, so the leader forgets them too.
    for (const runtime::NewProgram& fresh : message.new_programs) programs_.erase(fresh.hash);
    message.new_programs.clear();
    message.microbatches.clear();
  }
  if (context_.pipeline->size() > 1) {
    const std::string bytes = runtime::encode(message);
    for (int r = 1; r < context_.pipeline->size(); ++r) context_.pipeline->send_bytes(r, runtime::kStepTag, bytes);
  }
  if (own_error) std::rethrow_exception(own_error);
  if (!message.error.empty()) throw_refusal(message);
  return message;
}

// The leaders of the replicas see each other's refusals and whether all run the same step, and at the first step
// whether they planned the same.
void Conductor::agree_with_replicas(StepMessage& message) {
  if (context_.replicas->size() == 1) return;
  const auto refuse = [&](std::string text) {
    message.is_value_error = true;
    message.error = std::move(text);
  };
  const std::vector<ReplicaStep> all = gather(own_replica_step(message), *context_.replicas);
  for (size_t r = 0; r < all.size() && message.error.empty(); ++r) {
    if (all[r].error.empty()) continue;
    message.error = "replica " + std::to_string(r) + " refused the step: " + all[r].error;
    message.is_value_error = all[r].is_value_error;
  }
  for (size_t r = 1; r < all.size() && message.error.empty(); ++r) {
    if (all[r].same_step(all[0])) continue;
    refuse("step: expected all replicas to run the same step, got " + all[0].describe() + " on replica 0 and " +
           all[r].describe() + " on replica " + std::to_string(r) +
           ". Give every replica the same number of batches and call step functions in the same order.");
  }
  if (!message.error.empty() || !places(message)) return;
  std::string own_plans;
  for (const runtime::NewProgram& fresh : message.new_programs) own_plans += fresh.plan;
  const std::vector<std::string> plans = context_.replicas->all_gather(own_plans);
  for (size_t r = 1; r < plans.size() && message.error.empty(); ++r) {
    if (plans[r] == plans[0]) continue;
    refuse("step: expected the first step of a model to run, on all replicas, the same operators on the same shapes, got a "
           "difference between replicas 0 and " + std::to_string(r) + ". Give all replicas batches of one size.");
  }
}

ReplicaStep Conductor::own_replica_step(const StepMessage& message) {
  ReplicaStep own{.step_function = message.step_function, .training_steps = message.step, .error = message.error};
  own.is_value_error = message.is_value_error;
  own.trains = trains(message);
  if (own.trains) own.reduction = describe_reductions(models_, message.reduced);
  return own;
}

const Schedule& Conductor::schedule_of(const StepMessage& message) {
  std::vector<const Program*> programs;
  for (const auto& microbatch : message.microbatches) programs.push_back(programs_.find(microbatch.hash).get());
  return programs_.schedule(programs);
}

bool Conductor::trains(const StepMessage& message) const {
  return std::any_of(message.microbatches.begin(), message.microbatches.end(), [&](const auto& microbatch) {
    return programs_.find(microbatch.hash)->graph.has_backward();
  });
}

StepMessage Conductor::receive_message() {
  StepMessage message = runtime::decode_step_message(context_.pipeline->receive_bytes(0, runtime::kStepTag));
  if (!message.error.empty()) throw_refusal(message);
  return message;
}

void Conductor::accept(const StepMessage& message, int step_number) {
  TORCH_CHECK(message.step_function == step_number, "step: expected all ranks of a pipeline to call the same step "
              "function, got number ", message.step_function, " on pipeline rank 0 and number ", step_number,
              " on pipeline rank ", context_.pipeline->rank(), ". Make and call step functions in the same order.");
  for (const runtime::NewProgram& fresh : message.new_programs) {
    const auto program = programs_.add(deserialise_graph(fresh.graph), deserialise_plan(fresh.plan), fresh.hash);
    for (const auto& constant : fresh.constants) program->constants[constant.value] = constant.tensor;
  }
  training_steps_ = message.step;
  evaluation_steps_ = message.evaluation_step;
}

// The arguments of each microbatch.
std::vector<std::vector<at::Tensor>> Conductor::split(const step_internal::Call& call) const {
  std::vector<step_internal::StepTensor> arguments = call.arguments(context_.config.microbatches);
  // Parts may stay in the argument's memory, and an operator that writes to a buffer would change them there.
  const auto leave_buffers = [this](at::Tensor& tensor) {
    const bool is_buffers = tensor.defined() && tensor.has_storage() && models_.bindings().find_storage(tensor) != nullptr;
    if (is_buffers) tensor = tensor.detach().clone();
  };
  for (auto& argument : arguments) {
    leave_buffers(argument.tensor);
    for (at::Tensor& piece : argument.pieces) leave_buffers(piece);
  }
  return split_arguments(arguments, context_.config.microbatches);
}

Conductor::Captured Conductor::capture(int step_number, const step_internal::Call& call) {
  Captured captured;
  captured.inputs = split(call);
  auto& capture = captures_[step_number];
  if (!capture) capture = std::make_unique<runtime::BodyCapture>(models_.bindings());
  const std::string key = models_.training_flags();
  for (size_t m = 0; m < captured.inputs.size(); ++m) {
    std::vector<at::Tensor> ghosts = capture->begin(captured.inputs[m], key);
    body_in_progress_ = capture.get();
    try {
      std::vector<at::Tensor> returned;
      {
        const runtime::InterceptScope scope(*capture);
        returned = call.body(ghosts, static_cast<int64_t>(m));
      }
      captured.bodies.push_back(capture->finish(returned));
    } catch (...) {
      body_in_progress_ = nullptr;
      capture->abandon();
      throw;
    }
    body_in_progress_ = nullptr;
    ghosts.clear();
    capture->release_run();
  }
  return captured;
}

void Conductor::add_programs(const Captured& captured, StepMessage& message) {
  runtime::Owners planned = models_.owners();
  for (const runtime::CapturedBody& body : captured.bodies) {
    const runtime::Recording& recording = *body.recording;
    if (programs_.find(recording.hash) == nullptr) {
      Plan plan = programs_.make_plan(recording.graph, planned);
      planned = models_.owners_after(recording.graph, plan, planned);
      runtime::NewProgram fresh{.hash = recording.hash, .graph = serialise(recording.graph), .plan = serialise(plan),
                                .constants = {}};
      const auto program = programs_.add(recording.graph, std::move(plan), recording.hash);
      for (const runtime::ConstantTensor& constant : recording.constants) {
        program->constants[constant.value] = constant.recorded();
        fresh.constants.push_back({constant.value, constant.recorded()});
      }
      message.new_programs.push_back(std::move(fresh));
    }
    runtime::MicrobatchProgram microbatch{.hash = recording.hash};
    for (const auto& scalar : body.scalars) microbatch.scalars.push_back({scalar.node, scalar.argument, scalar.value});
    for (const auto& constant : body.constants) microbatch.constants.push_back({constant.value, constant.tensor});
    add_own_constants(recording, *programs_.find(recording.hash), microbatch);
    message.microbatches.push_back(std::move(microbatch));
  }
}

// Whether the step uses a model for the first time.
bool Conductor::places(const StepMessage& message) {
  return std::any_of(message.microbatches.begin(), message.microbatches.end(), [&](const auto& microbatch) {
    return models_.needs_placement(programs_.find(microbatch.hash)->graph, models_.owners());
  });
}

std::vector<runtime::MicrobatchRun> Conductor::prepare(const StepMessage& message, Captured* captured) {
  std::vector<runtime::MicrobatchRun> runs;
  const auto first = static_cast<uint64_t>(context_.replicas->rank()) * message.microbatches.size();
  // Evaluations draw from a stream of their own, a new part of it each time, and leave that of training alone.
  const uint64_t step = trains(message) ? message.step : kEvaluationStream + message.evaluation_step;
  for (size_t m = 0; m < message.microbatches.size(); ++m) {
    const auto& microbatch = message.microbatches[m];
    const auto program = programs_.find(microbatch.hash);
    TORCH_INTERNAL_ASSERT(program != nullptr, "the leader names a program that it never sent");
    runtime::MicrobatchRun run;
    run.program = &program->rank_program;
    run.context.microbatch = static_cast<int>(m);
    run.context.random = {static_cast<uint64_t>(context_.config.seed), step, first + m};
    for (const auto& scalar : microbatch.scalars) {
      run.context.scalars.push_back({scalar.node, scalar.argument, scalar.value});
    }
    if (captured != nullptr) {
      run.inputs = std::move(captured->inputs[m]);
      for (size_t input : program->written_inputs) run.inputs[input] = run.inputs[input].clone();
    }
    run.tensors = [program, changed = microbatch.constants](ValueId id) {
      for (const auto& constant : changed) {
        if (constant.value == id) return constant.tensor;
      }
      const auto constant = program->constants.find(id);
      return constant != program->constants.end() ? constant->second : program->named_tensors[id];
    };
    runs.push_back(std::move(run));
  }
  return runs;
}

void Conductor::broadcast_buffers() {
  if (context_.replicas->size() == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& model : models_.all()) {
    if (!model->reduction.broadcasts_buffers) continue;
    for (const runtime::NamedTensor& named : model->own.tensors()) {
      if (named.kind != ValueKind::kBuffer || !is_placed_here(named)) continue;
      at::Tensor data = named.tensor.contiguous();
      context_.replicas->broadcast(data.mutable_data_ptr(), static_cast<int64_t>(data.nbytes()), 0);
      at::Tensor tensor = named.tensor;
      if (!data.is_alias_of(tensor)) tensor.copy_(data);
    }
  }
}

bool Conductor::is_placed_here(const runtime::NamedTensor& named) const {
  return models_.is_placed(named.tensor) && models_.is_here(named.tensor);
}

}  // namespace smp::detail
