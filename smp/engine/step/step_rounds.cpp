// Rounds: forward, backward, both; what they leave behind and how it is undone.
#include "smp/engine/step/step_rounds.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <span>

#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"
#include "runtime/gradients/tied_gradients.h"
#include "runtime/stage/stage_values.h"
#include "smp/engine/programs/write_conflicts.h"
#include "smp/engine/replicas/replica_gradients.h"
#include "smp/engine/step/captured_runs.h"
#include "smp/engine/step/nonfinite.h"
#include "smp/engine/step/results.h"

namespace smp::engine {

using namespace partitioner;
using runtime::Round;
using runtime::StepMessage;

namespace {

constexpr uint64_t kEvaluationStream = uint64_t{1} << 63;  // numbers of training steps never come so far

}  // namespace

void tell_followers(const RankState& rank, const StepMessage& message) {
  runtime::Transport& pipeline = *rank.context.pipeline;
  if (pipeline.size() == 1) return;
  const std::string bytes = runtime::encode(message);
  for (int r = 1; r < pipeline.size(); ++r) pipeline.send_bytes(r, runtime::kStepTag, bytes);
}

void throw_refusal(const StepMessage& message) {
  if (message.is_value_error) TORCH_CHECK_VALUE(false, message.error);
  TORCH_CHECK(false, message.error);
}

// Evaluations draw from a stream of their own, a new part of it each time, and leave that of training alone.
runtime::RandomState random_state(const RankState& rank, bool trains, uint64_t step, uint64_t number, uint64_t count) {
  const auto first = static_cast<uint64_t>(rank.context.replicas->rank()) * count;
  return {static_cast<uint64_t>(rank.context.config.seed), trains ? step : kEvaluationStream + step, first + number};
}

std::optional<step_internal::Results> StepRounds::perform_round(const StepMessage& message, MicrobatchInputs& inputs) {
  const runtime::RecordedRound round(rank_.recorder(), rank_.leads());
  begin(message);
  const auto first = static_cast<size_t>(message.first);
  switch (message.round) {
    case Round::kWhole:
      add_runs(message, inputs);
      return end(message, TablePart::kWhole);
    case Round::kForward:
    case Round::kProbe:
      drop_from(first);
      add_runs(message, inputs);
      if (!message.microbatches.empty()) perform_column(schedule(TablePart::kForward, first), first);
      collect_reads(first);
      if (message.round == Round::kProbe) {
        auto wanted = read_;
        drop_from(first);
        read_ = std::move(wanted);
      }
      return std::nullopt;
    case Round::kFinish:
      return end(message, TablePart::kBackward);
    case Round::kShadow:
      shadow(message);
      return step_internal::Results{};
    case Round::kJoined:
      break;
  }
  C10_THROW_ERROR(Error, "a step is run by rounds of the conductor's, and this is none");
}

// Models are placed when nothing can refuse the step any more, in the order in which the leader planned. Rounds before that
// find every value on every rank.
void StepRounds::begin(const StepMessage& message) {
  const bool is_first = !std::exchange(has_begun_, true);
  if (is_first) rank_.executor->take_computing_ns();  // of a step that was refused
  for (const runtime::NewProgram& fresh : message.new_programs) {
    added_.emplace_back(rank_.programs.find(fresh.hash), message.round);
  }
  const bool runs_ahead = message.round == Round::kForward || message.round == Round::kProbe;
  if (is_first && runs_ahead) rank_.models.make_alike();
  if (message.round == Round::kWhole || message.round == Round::kFinish) {
    for (const auto& [program, round] : added_) {
      const bool is_known = rank_.programs.find(program->hash) == program;  // else forgotten: dropped before it ended
      if (is_known) place(program, round);
    }
  }
  const runtime::RecordedSpan span(is_first ? rank_.recorder() : nullptr, Activity::kCollective);
  if (is_first) broadcast_buffers(message.first_active_replica);
}

// With the hooks of the models that it places as a whole.
void StepRounds::place(const std::shared_ptr<Program>& program, Round round) {
  Models& models = rank_.models;
  const bool needs_placement = models.needs_placement(program->graph, models.homes());
  if (round == Round::kProbe) {
    if (needs_placement) models.place(program, Placement::kUsedTensors);
    return;
  }
  const auto placed = models.to_place(program->graph);
  if (placed.empty() && !needs_placement) return;
  for (const auto& model : placed) model->hooks->call(Moment::kBeforePartition);
  models.place(program, Placement::kWholeModels);
  for (const auto& model : placed) model->hooks->call(Moment::kAfterPartition);
}

void StepRounds::add_runs(const StepMessage& message, MicrobatchInputs& inputs) {
  TORCH_INTERNAL_ASSERT(runs_.size() == static_cast<size_t>(message.first), "the leader skips microbatches");
  const size_t total = runs_.size() + message.microbatches.size();
  programs_.reserve(total);
  runs_.reserve(total);
  results_.reserve(total);
  for (size_t i = 0; i < message.microbatches.size(); ++i) {
    const bool is_known = i > 0 && message.microbatches[i].hash == message.microbatches[i - 1].hash;
    programs_.push_back(is_known ? programs_.back() : rank_.programs.find(message.microbatches[i].hash));
    TORCH_INTERNAL_ASSERT(programs_.back() != nullptr, "the leader names a program that it never sent");
    runs_.push_back(make_run(message, i, inputs));
    results_.emplace_back();
    if (message.round != Round::kWhole) keep_written(runs_.back(), *programs_.back(), runs_.size() - 1);
  }
}

runtime::MicrobatchRun StepRounds::make_run(const StepMessage& message, size_t index, MicrobatchInputs& inputs) {
  const size_t number = runs_.size();
  const auto& microbatch = message.microbatches[index];
  const std::shared_ptr<Program>& program = programs_.back();
  runtime::MicrobatchRun run;
  run.program = &program->rank_program;
  run.context.microbatch = static_cast<int>(number);
  run.context.is_last = run.context.microbatch + 1 == message.num_microbatches;
  run.context.random = random_state(rank_, message.trains, message.trains ? message.step : message.evaluation_step, number,
                                    static_cast<uint64_t>(message.num_microbatches));
  run.context.scalars = microbatch.scalars;
  if (!inputs.empty()) {
    run.inputs = message.round == Round::kWhole ? std::move(inputs[number]) : inputs[number];
    for (size_t input : program->written_inputs) run.inputs[input] = run.inputs[input].clone();
  }
  run.tensors = [own = program.get(), changed = microbatch.constants](ValueId id) {
    for (const auto& constant : changed) {
      if (constant.value == id) return constant.tensor;
    }
    const auto constant = own->constants.find(id);
    return constant != own->constants.end() ? constant->second : own->named_tensors[id];
  };
  return run;
}

// Copies what the forward of a microbatch will write to, so that it can be undone.
void StepRounds::keep_written(runtime::MicrobatchRun& run, const Program& program, size_t number) {
  if (program.written_tensors.empty()) return;
  run.before_forward = [this, &program, number](int stage) {
    const auto tensors = program.written_tensors.find(stage);
    if (tensors == program.written_tensors.end()) return;
    for (ValueId id : tensors->second) {
      const at::Tensor& tensor = program.named_tensors[id];
      written_[number].emplace_back(tensor, tensor.detach().clone());
    }
  };
}

void StepRounds::drop_from(size_t first) {
  const at::NoGradGuard no_grad;
  for (size_t m = runs_.size(); m-- > first;) {
    for (auto& [index, stage] : runs_[m].program->stages) stage->drop(static_cast<int>(m));
    Written& written = written_[m];
    for (auto entry = written.rbegin(); entry != written.rend(); ++entry) {
      // With a version counter of its own: earlier microbatches have saved the tensor, and batch_norm, which wrote to it,
      // did not count that either.
      entry->first.variable_data().copy_(entry->second);
    }
    written_.erase(m);
    read_.erase(m);
  }
  const size_t left = std::min(first, runs_.size());
  runs_.erase(runs_.begin() + static_cast<ptrdiff_t>(left), runs_.end());
  results_.resize(left);
  programs_.resize(left);
}

void StepRounds::prove_table(const std::vector<Program*>& programs) {
  whole_ = &rank_.programs.schedule(programs, TablePart::kWhole);
}

const Schedule& StepRounds::schedule(TablePart part, size_t first) {
  std::vector<Program*> programs;
  for (size_t m = first; m < programs_.size(); ++m) programs.push_back(programs_[m].get());
  return rank_.programs.schedule(programs, part);
}

void StepRounds::perform_column(const Schedule& schedule, size_t first, runtime::RunOptions options) {
  options.recorder = rank_.recorder();
  const std::span<runtime::MicrobatchRun> runs(runs_.data() + first, runs_.size() - first);
  runtime::RankResults made = rank_.executor->run(schedule, runs, options);
  for (size_t i = 0; i < made.size(); ++i) results_[first + i].merge(made[i]);
}

void StepRounds::check_writes() const {
  std::vector<Program*> programs;
  for (const auto& program : programs_) programs.push_back(program.get());
  const std::string conflict = write_conflict(programs);
  TORCH_CHECK_NOT_IMPLEMENTED(
      conflict.empty(),
      "step: expected a body that reads values to leave alone what the backwards of earlier microbatches need, got ",
      conflict,
      ". All forwards run before the first backward there. Write to it in every microbatch or after the step, let the "
      "operator use a clone() of it, or return what the body reads.");
}

// The leader's body waits for these.
void StepRounds::collect_reads(size_t first) {
  runtime::Transport& pipeline = *rank_.context.pipeline;
  const at::NoGradGuard no_grad;
  std::set<int> owners;
  runtime::WireWriter own;
  const auto for_each_read = [&](const auto& visit) {
    for (size_t m = first; m < runs_.size(); ++m) {
      const Graph& graph = programs_[m]->graph;
      for (ValueId id : graph.read) visit(m, id, runtime::rank_of_value(graph, programs_[m]->plan, id));
    }
  };
  for_each_read([&](size_t m, ValueId id, int owner) {
    owners.insert(owner);
    if (owner != pipeline.rank()) return;
    const auto made = results_[m].find(id);
    const at::Tensor tensor = made != results_[m].end() ? made->second : runs_[m].tensors(id).detach();
    if (rank_.leads()) {
      read_[m][id] = tensor.clone();
    } else {
      own.put(tensor);
    }
  });
  if (!rank_.leads()) {
    if (owners.contains(pipeline.rank())) pipeline.send_bytes(0, runtime::kReadTag, own.take());
    return;
  }
  for (int owner : owners) {
    if (owner == 0) continue;
    runtime::read_all(pipeline.receive_bytes(owner, runtime::kReadTag), "values that the body reads",
                      [&](runtime::WireReader& in) {
                        for_each_read([&](size_t m, ValueId id, int of) {
                          if (of == owner) read_[m][id] = in.get_tensor();
                        });
                      });
  }
}

step_internal::Results StepRounds::end(const StepMessage& message, TablePart part) {
  std::optional<runtime::TiedGradients> tied;
  std::optional<ReplicaGradients> gradients;
  runtime::RunOptions options;
  const Schedule* table = part == TablePart::kWhole ? whole_ : nullptr;
  if (table == nullptr && (part == TablePart::kWhole || message.trains)) table = &schedule(part, 0);
  if (message.trains) {
    const std::string hooked = hook_on_parts(programs_, rank_.models.bindings());  // of this rank
    TORCH_CHECK_NOT_IMPLEMENTED(hooked.empty(), hooked);
    note_cleared(rank_);
    tied.emplace(
        rank_.models.homes(), rank_.models.bindings(), [this](const std::string& name) { return trained_on(name); },
        *rank_.context.pipeline);
    if (rank_.context.replicas->size() > 1) {
      gradients.emplace(rank_.context, rank_.models, message.reduced, message.gradient_divisor);
      gradients->begin(table->columns[static_cast<size_t>(rank_.context.pipeline->rank())], runs_);
      options.observer = &*gradients;
    }
    if (!rank_.models.all().front()->reduction.averages_microbatches) options.loss_divisor = 1;
  }
  if (table != nullptr) perform_column(*table, 0, options);
  if (message.trains) note_losses(rank_, programs_, results_, message.reduced);
  Program& first = *programs_.front();
  if (message.payload) first.payload = *message.payload;
  step_internal::Results returned{exchange_recorded_results(), message.values, first.payload, programs_.size()};
  if (message.trains) {
    const runtime::RecordedSpan span(rank_.recorder(), Activity::kCollective);
    tied->finish();
    if (gradients) gradients->finish();
    agree_on_nonfinite(rank_, message.reduced, message.step + 1);
  }
  count(message);
  if (rank_.context.join) ++rank_.context.join->num_steps;
  return returned;
}

// In any microbatch of the step.
std::vector<int> StepRounds::trained_on(const std::string& parameter) const {
  std::set<int> ranks;
  for (const auto& program : std::set(programs_.begin(), programs_.end())) {
    const auto found = program->trained_on.find(parameter);
    if (found != program->trained_on.end()) ranks.insert(found->second.begin(), found->second.end());
  }
  TORCH_INTERNAL_ASSERT(!rank_.context.config.exact_tied_weights || ranks.size() < 2, "the programs of a step add up the ",
                        "gradient of '", parameter, "' on several ranks");
  return {ranks.begin(), ranks.end()};
}

std::vector<StepOutput> StepRounds::exchange_recorded_results() {
  const runtime::RecordedSpan span(rank_.recorder(), Activity::kResults);
  return exchange_results(runs_, std::move(results_), *rank_.context.pipeline);
}

void StepRounds::shadow(const StepMessage& message) {
  if (message.trains) {
    drop_averaged(rank_.models, message.reduced);
    note_cleared(rank_, /*has_step=*/false);
    ReplicaGradients gradients(rank_.context, rank_.models, message.reduced, message.gradient_divisor);
    gradients.begin({}, {});
    gradients.finish();
    agree_on_nonfinite(rank_, message.reduced, message.step + 1);
  }
  count(message);
}

void StepRounds::count(const StepMessage& message) {
  if (rank_.context.timeline) rank_.context.timeline->count_step(message.trains, programs_, rank_.programs);
  if (message.trains) {
    count_pass(rank_.models, message.reduced);
    rank_.training_steps = message.step + 1;
  } else {
    rank_.evaluation_steps = message.evaluation_step + 1;
  }
  note_pace(message);
}

// All ranks of the world count the same training steps.
void StepRounds::note_pace(const StepMessage& message) {
  Context& context = rank_.context;
  int64_t computing_ns = rank_.executor->take_computing_ns();
  if (!message.trains || context.world->size() == 1) return;
  // The host may be ahead of a device, and a hook may wait for other replicas in the middle of a backward.
  const auto& models = rank_.models.all();
  const bool has_hook =
      std::any_of(models.begin(), models.end(), [](const auto& model) { return bool(model->reduction.hook); });
  if (&runtime::this_ranks_device() != &runtime::host() || has_hook) computing_ns = 0;
  std::optional<uint64_t> alike;
  for (const auto& program : programs_) alike = alike.value_or(0) * 31 + program->hash;
  rank_.pace.add(computing_ns, alike);
  if (rank_.training_steps % Stragglers::kWindow != 0) return;
  const runtime::RecordedSpan span(rank_.recorder(), Activity::kCollective);
  const std::vector<Pace> paces = runtime::gather(rank_.pace.take(), *context.world, "pace");
  if (context.world->rank() != 0) return;
  if (!rank_.stragglers) {
    std::vector<int> pipeline_ranks;
    for (int r = 0; r < context.world->size(); ++r) pipeline_ranks.push_back(context.topology.coordinates(r).pp_rank);
    rank_.stragglers.emplace(std::move(pipeline_ranks));
  }
  for (const std::string& line : rank_.stragglers->end_window(paces)) context.logger.warning(line);
}

void StepRounds::broadcast_buffers(int source) {
  for (const auto& model : rank_.models.all()) {
    if (!model->reduction.broadcasts_buffers) continue;
    broadcast_over_replicas(rank_, *model, source,
                            [](const runtime::NamedTensor& named) { return named.kind == ValueKind::kBuffer; });
  }
}

void broadcast_over_replicas(const RankState& rank, const Model& model, int source,
                             const std::function<bool(const runtime::NamedTensor&)>& is_wanted) {
  std::vector<at::Tensor> tensors;
  for (const runtime::NamedTensor& named : model.own.tensors()) {
    if (is_wanted(named) && rank.models.is_placed_here(named.tensor)) tensors.push_back(named.tensor);
  }
  runtime::broadcast_tensors(tensors, *rank.context.replicas, source);
}

}  // namespace smp::engine
