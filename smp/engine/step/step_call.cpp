// The way into a step: its number, the hooks around it, and the results of replicas that share its batch.
#include "smp/step_call.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>

#include "runtime/delayed/construction.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/wire.h"
#include "smp/engine/context/call.h"
#include "smp/engine/engine.h"
#include "smp/engine/step/step_on_rank.h"

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

}  // namespace smp::step_internal

namespace smp::engine {

using step_internal::Call;
using step_internal::Results;

namespace {

void check_outside_hooks(const RankState& rank) {
  const auto& models = rank.models.all();
  const bool is_outside =
      std::none_of(models.begin(), models.end(), [](const auto& model) { return model->hooks->is_calling(); });
  TORCH_CHECK_VALUE(is_outside, "step: expected a call outside of hooks, got one from within a hook. Call it before or ",
                    "after the step that calls the hook.");
}

// Those of all models, in the order in which they were made. An exception ends the job: the others are on their way into
// the step, or out of it.
void call_hooks(const RankState& rank, const std::function<void(const Model&)>& call) {
  const std::vector<std::shared_ptr<Model>> models = rank.models.all();
  runtime::or_end_the_job(*rank.context.world, [&] {
    for (const auto& model : models) call(*model);
  });
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
  out.put(own.payload);
  std::vector<std::vector<at::Tensor>> tensors(own.tensors.size());
  std::set<std::string> payloads;
  Results all{.tensors = {},
              .values = {},
              .payload = own.payload,
              .num_microbatches = own.num_microbatches * static_cast<size_t>(replicas.size())};
  for (const std::string& bytes : replicas.all_gather(out.take())) {
    runtime::read_all(bytes, "results of a replica", [&](runtime::WireReader& in) {
      const auto count = in.get<uint64_t>();
      TORCH_CHECK_VALUE(count == tensors.size(), "step: expected the body to return the same number of tensors on all ",
                        "replicas, got ", tensors.size(), " and ", count, ".");
      for (auto& gathered : tensors) {
        for (auto left = in.get<uint64_t>(); left > 0; --left) gathered.push_back(in.get_tensor());
      }
      for (auto left = in.get<uint64_t>(); left > 0; --left) all.values.push_back(in.get_string());
      payloads.insert(in.get_string());
    });
  }
  TORCH_CHECK_VALUE(payloads.size() == 1,
                    "step: expected the body to return the same sizes of containers, keys of maps and filled optionals on "
                    "all replicas, got ",
                    payloads.size(), " kinds. Return a tensor of zeros where there is nothing to return.");
  for (auto& gathered : tensors) all.tensors.emplace_back(std::move(gathered));
  return all;
}

}  // namespace

Results call_step(int step_number, const Call& call) {
  RankState& rank = rank_state("step");
  check_outside_hooks(rank);
  TORCH_CHECK_VALUE(
      !runtime::ConstructionScope::is_open(), "step: expected all smp::DelayParamInitialization scopes to end ",
      "before, got a call inside of one. Put the scope and the making of the modules into braces of their own.");
  if (rank.context.body_in_progress == nullptr) {
    call_hooks(rank, [](const Model& model) { model.hooks->call(Moment::kBeforeStep); });
  }
  Results results = step_on_rank(rank, step_number, call);
  const bool shares_batch = rank.context.config.parallelism == Parallelism::kAuto && rank.context.replicas->size() > 1;
  if (shares_batch) {
    const InCall in_call(rank.context, "step");
    results = gather_shares(results, *rank.context.replicas);
  }
  call_hooks(rank, [](const Model& model) { model.hooks->step_ends(model.is_partitioned()); });
  return results;
}

int64_t num_graphs() { return context("smp::num_graphs").num_graphs; }

}  // namespace smp::engine
