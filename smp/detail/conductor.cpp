// Leaders lead, followers follow.
#include "smp/detail/conductor.h"

#include <c10/util/Exception.h>

#include "partitioner/graph/graph_io.h"
#include "partitioner/plan/plan_io.h"
#include "runtime/tags.h"
#include "runtime/watch/root_cause.h"
#include "smp/detail/leader.h"

namespace smp::detail {

using runtime::StepMessage;

Conductor& conductor(const char* caller) {
  Context& own = context(caller);
  TORCH_CHECK(own.conductor != nullptr, caller, ": expected a DistributedModel, got none. Wrap the module first: ",
              "smp::DistributedModel model(net);");
  return *own.conductor;
}

std::shared_ptr<Model> Conductor::add_model(std::shared_ptr<torch::nn::Module> module, const std::string& name) {
  return rank_.models.add(std::move(module), name);
}

void Conductor::remove_model(const Model& model) {
  rank_.models.remove(model);
  rank_.captures.clear();
  rank_.programs.clear();
}

std::vector<StepOutput> Conductor::run_step(int step_number, const step_internal::Call& call) {
  TORCH_CHECK(body_in_progress() == nullptr, "step: expected a call outside of step bodies, got one from within a body. "
              "Call the step functions one after the other, or share a plain function between their bodies.");
  return rank_.leads() ? Leader(rank_, step_number, call).run() : follow(step_number);
}

std::vector<StepOutput> Conductor::follow(int step_number) {
  StepRun run(rank_);
  MicrobatchInputs none;
  for (;;) {
    const StepMessage message = receive_message();
    if (!message.error.empty()) {
      run.drop_from(0);
      throw_refusal(message);
    }
    try {
      accept(message, step_number);
      if (auto returned = run.perform(message, none)) return std::move(*returned);
    } catch (...) {
      // The others are in the middle of this step and would wait for ever, should the caller go on.
      context().world->abort(runtime::describe_exception(std::current_exception()));
      throw;
    }
  }
}

StepMessage Conductor::receive_message() {
  StepMessage message = runtime::decode_step_message(context().pipeline->receive_bytes(0, runtime::kStepTag));
  for (uint64_t hash : message.forgotten) rank_.programs.erase(hash);
  return message;
}

void Conductor::accept(const StepMessage& message, int step_number) {
  TORCH_CHECK(message.step_function == step_number, "step: expected all ranks of a pipeline to call the same step "
              "function, got number ", message.step_function, " on pipeline rank 0 and number ", step_number,
              " on pipeline rank ", context().pipeline->rank(), ". Make and call step functions in the same order.");
  for (const runtime::NewProgram& fresh : message.new_programs) {
    const auto program = rank_.programs.add(partitioner::deserialise_graph(fresh.graph),
                                            partitioner::deserialise_plan(fresh.plan), fresh.hash);
    for (const auto& constant : fresh.constants) program->constants[constant.value] = constant.tensor;
  }
}

}  // namespace smp::detail
