// The type-erased entry of step functions.
#include "smp/step.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>

#include "runtime/delayed/construction.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/wire.h"
#include "smp/comm.h"
#include "smp/engine/conductor.h"

namespace smp::step_internal {

struct StepNumber::Registration {
  int number = -1;
  std::weak_ptr<engine::StepNumbers> numbers;  // of the job that gave the number

  void end() {
    if (const auto job = numbers.lock()) job->ended.push_back(number);
  }
  void begin() {
    auto* own = engine::try_context();
    if (own == nullptr || own->steps == numbers.lock()) return;
    end();
    numbers = own->steps;
    number = own->steps->num_made++;
  }
  ~Registration() { end(); }
};

StepNumber::StepNumber() : registration_(std::make_shared<Registration>()) { registration_->begin(); }

int StepNumber::get() {
  registration_->begin();
  return registration_->number;
}

namespace {

void check_outside_hooks(const engine::Conductor& conductor) {
  const auto& models = conductor.models().all();
  const bool is_outside =
      std::none_of(models.begin(), models.end(), [](const auto& model) { return model->hooks->is_calling(); });
  TORCH_CHECK_VALUE(is_outside, "step: expected a call outside of hooks, got one from within a hook. Call it before or ",
                    "after the step that calls the hook.");
}

// Those of all models, in the order in which they were made. An exception ends the job: the others are on their way into
// the step, or out of it.
void call_hooks(const engine::Conductor& conductor, const std::function<void(const engine::Model&)>& call) {
  const std::vector<std::shared_ptr<engine::Model>> models = conductor.models().all();
  try {
    for (const auto& model : models) call(*model);
  } catch (...) {
    conductor.context().world->abort(runtime::describe_exception(std::current_exception()));
    throw;
  }
}

// The leader's, on every rank of the pipeline.
std::vector<std::string> share_values(const Call& call, runtime::Transport& pipeline) {
  if (pipeline.rank() != 0) {
    return comm_internal::object_of<std::vector<std::string>>(pipeline.receive_bytes(0, runtime::kValueTag));
  }
  std::vector<std::string> values = call.values();
  Writer out;
  out.put(values);
  const std::string bytes = out.take();
  for (int r = 1; r < pipeline.size(); ++r) pipeline.send_bytes(r, runtime::kValueTag, bytes);
  return values;
}

// Replicas that share a batch: the results of all of it, in the order of the batch. Replicas of one batch return the same
// number of tensors, or differ in what they ran and were told so.
Results gather_shares(const Results& own, runtime::Transport& replicas) {
  runtime::WireWriter out;
  out.put(static_cast<uint64_t>(own.tensors.size()));
  for (const StepOutput& output : own.tensors) {
    out.put(static_cast<uint64_t>(output.size()));
    for (const at::Tensor& tensor : output.outputs()) out.put(tensor);
  }
  out.put(static_cast<uint64_t>(own.values.size()));
  for (const std::string& value : own.values) out.put(value);
  std::vector<std::vector<at::Tensor>> tensors(own.tensors.size());
  Results all;
  for (const std::string& bytes : replicas.all_gather(out.take())) {
    runtime::read_all(bytes, "results of a replica", [&](runtime::WireReader& in) {
      const auto count = in.get<uint64_t>();
      TORCH_CHECK_VALUE(count == tensors.size(), "step: expected the body to return the same number of tensors on all ",
                        "replicas, got ", tensors.size(), " and ", count, ".");
      for (auto& gathered : tensors) {
        for (auto left = in.get<uint64_t>(); left > 0; --left) gathered.push_back(in.get_tensor());
      }
      for (auto left = in.get<uint64_t>(); left > 0; --left) all.values.push_back(in.get_string());
    });
  }
  for (auto& gathered : tensors) all.tensors.emplace_back(std::move(gathered));
  return all;
}

bool stays_whole(const StepOptions& options, int64_t position) {
  const auto& whole = options.non_split_inputs;
  return std::find(whole.begin(), whole.end(), position) != whole.end();
}

void check_position(const char* option, int64_t position, int64_t num_arguments) {
  TORCH_CHECK_VALUE(position < num_arguments, "step: ", option, ": expected positions below ", num_arguments,
                    ", the number of arguments, got ", position, ". Arguments are counted from 0.");
}

}  // namespace

Results run(int step_number, const Call& call) {
  engine::Conductor& conductor = engine::conductor("step");
  check_outside_hooks(conductor);
  TORCH_CHECK_VALUE(!runtime::ConstructionScope::is_open(), "step: expected all smp::DelayParamInitialization scopes to end ",
                    "before, got a call inside of one. Put the scope and the making of the modules into braces of their own.");
  if (conductor.body_in_progress() == nullptr) {
    call_hooks(conductor, [](const engine::Model& model) { model.hooks->call(engine::Moment::kBeforeStep); });
  }
  Results results{conductor.run_step(step_number, call), {}};
  const engine::Context& own = conductor.context();
  if (call.values) results.values = share_values(call, *own.pipeline);
  const bool shares_batch = own.config.parallelism == Parallelism::kAuto && own.replicas->size() > 1;
  if (shares_batch) results = gather_shares(results, *own.replicas);
  call_hooks(conductor, [](const engine::Model& model) { model.hooks->step_ends(model.first_program != nullptr); });
  return results;
}

void check_end(const Reader& in, const std::string& type) {
  TORCH_CHECK_VALUE(in.at_end(), "step: expected Serialiser::read of ", type, ", which the body returns, to read all that ",
                    "Serialiser::write wrote, got some left. Read in the order of writing.");
}

void refuse_structure(size_t m) {
  TORCH_CHECK_VALUE(false, "step: expected the body to return the same sizes of containers, keys of maps and filled "
                    "optionals for every microbatch, got others for microbatch ", m, " than for 0. Return a tensor of zeros "
                    "where there is nothing to return.");
}

void check_options(const StepOptions& options) {
  TORCH_CHECK_VALUE(options.detach_outputs, "step: detach_outputs: expected true, got false. Results are on every rank, "
                    "and the graph behind them is not: what needs it belongs into the body.");
  for (const int64_t position : options.non_split_inputs) {
    TORCH_CHECK_VALUE(position >= 0, "step: non_split_inputs: expected positions from 0, got ", position, ".");
  }
  for (const auto& [position, axis] : options.input_split_axes) {
    TORCH_CHECK_VALUE(position >= 0, "step: input_split_axes: expected positions from 0, got ", position, ".");
    TORCH_CHECK_VALUE(!stays_whole(options, position), "step: expected argument ", position, " in non_split_inputs or in ",
                      "input_split_axes, got it in both. Remove one.");
  }
}

std::vector<Cut> cuts_of(const StepOptions& options, int64_t num_arguments) {
  for (const int64_t position : options.non_split_inputs) check_position("non_split_inputs", position, num_arguments);
  for (const auto& [position, axis] : options.input_split_axes) {
    check_position("input_split_axes", position, num_arguments);
  }
  std::vector<Cut> cuts;
  for (int64_t i = 0; i < num_arguments; ++i) {
    const auto axis = options.input_split_axes.find(i);
    cuts.push_back({i, axis == options.input_split_axes.end() ? 0 : axis->second, stays_whole(options, i)});
  }
  return cuts;
}

void refuse_slices(int64_t position, size_t expected, size_t got, int64_t microbatch) {
  TORCH_CHECK_VALUE(false, "step argument ", position, ": expected smp_slice to return the same number of tensors for every ",
                    "microbatch, got ", expected, " for microbatch 0 and ", got, " for ", microbatch, ".");
}

void refuse_whole(int64_t position) {
  TORCH_CHECK_VALUE(false, "step argument ", position, ": expected an object whose smp_slice returns its own type, got one ",
                    "that returns another and is named in non_split_inputs. Let the body capture it instead.");
}

}  // namespace smp::step_internal

int64_t smp::num_graphs() { return engine::context("smp::num_graphs").num_graphs; }
