// Planning and preparing of programs.
#include "smp/engine/programs/programs.h"

#include <algorithm>
#include <unordered_set>

#include "partitioner/graph/gradient_flow.h"
#include "partitioner/memory/rank_memory.h"
#include "partitioner/partition/partition.h"
#include "partitioner/partition/segments.h"
#include "partitioner/plan/check_plan.h"
#include "partitioner/plan/trained_on.h"
#include "partitioner/schedule/check.h"
#include "partitioner/schedule/given.h"
#include "partitioner/schedule/walk.h"
#include "smp/engine/context/planned_device.h"
#include "smp/engine/programs/write_conflicts.h"

namespace smp::engine {

using namespace partitioner;

namespace {

std::vector<size_t> written_inputs(const Graph& graph) {
  std::unordered_set<int32_t> written;
  for (const Node& node : graph.nodes) written.insert(node.written_storages.begin(), node.written_storages.end());
  std::vector<size_t> positions;
  for (size_t i = 0; i < graph.inputs.size(); ++i) {
    if (written.contains(graph.values[graph.inputs[i]].storage)) positions.push_back(i);
  }
  return positions;
}

std::map<int, std::vector<ValueId>> written_tensors(const Graph& graph, const Plan& plan) {
  std::map<int, std::vector<ValueId>> by_stage;
  for (size_t v = 0; v < graph.values.size(); ++v) {
    if (!is_named(graph.values[v])) continue;
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      const auto& written = graph.nodes[n].written_storages;
      if (std::find(written.begin(), written.end(), graph.values[v].storage) == written.end()) continue;
      by_stage[plan.stage_of_node[n]].push_back(static_cast<ValueId>(v));
      break;
    }
  }
  return by_stage;
}

runtime::TensorHomes used_by(const Graph& graph, const runtime::TensorHomes& placed) {
  runtime::TensorHomes used;
  for (const Value& value : graph.values) {
    const auto home = is_named(value) ? placed.find(value.name) : placed.end();
    if (home != placed.end()) used.insert(*home);
  }
  return used;
}

// Released tensors keep their geometry.
void check_same_tensor(const Value& value, const at::Tensor& own) {
  TORCH_CHECK_VALUE(own.sizes().equals(value.spec.sizes) && own.scalar_type() == value.spec.dtype,
                    "step: expected the same model on all ranks, got the tensor '", value.name, "' as ", value.spec.dtype,
                    " ", at::IntArrayRef(value.spec.sizes), " on the leader and as ", own.scalar_type(), " ", own.sizes(),
                    " here. Make the module from the same sizes on every rank.");
}

std::vector<at::Tensor> trained_by(const Graph& graph, const std::vector<at::Tensor>& named_tensors) {
  std::vector<at::Tensor> trained;
  if (!graph.has_backward()) return trained;
  const GradientFlow flow(graph);
  for (size_t v = 0; v < graph.values.size(); ++v) {
    const bool is_reached = graph.values[v].kind == ValueKind::kParameter && flow.receives_gradient(static_cast<ValueId>(v));
    if (is_reached) trained.push_back(named_tensors[v]);
  }
  return trained;
}

// A write reaches the one copy that the writer's rank holds.
void check_one_copy(const Graph& graph, const runtime::TensorHomes& placed) {
  for (const Value& value : graph.values) {
    const auto home = is_named(value) ? placed.find(value.name) : placed.end();
    if (home == placed.end() || !home->second.is_tied()) continue;
    for (const Node& node : graph.nodes) {
      const auto& written = node.written_storages;
      TORCH_CHECK_VALUE(
          std::find(written.begin(), written.end(), value.storage) == written.end(),
          "step: expected a body that writes to tensors which live on one rank, got ", node.op, ", which writes to '",
          value.name,
          "', and earlier steps that read it on several ranks, each a copy of its own. Pin its readers to one rank "
          "(smp::set_partition), call the step that writes to it first, or write to it between steps, on every rank.");
    }
  }
}

ScheduleKind schedule_kind(Pipeline pipeline) {
  switch (pipeline) {
    case Pipeline::kInterleaved:
      return ScheduleKind::kInterleaved;
    case Pipeline::kSimple:
      return ScheduleKind::kSimple;
  }
  TORCH_INTERNAL_ASSERT(false, "config_table.cpp lets no other pipeline pass");
}

void keep_only(TablePart part, Schedule& schedule) {
  for (auto& column : schedule.columns) {
    std::erase_if(column, [part](const Action& action) { return action.is_forward() != (part == TablePart::kForward); });
  }
}

std::unique_ptr<runtime::Stage> make_stage(const Graph& graph, const Plan& plan, int stage,
                                           const runtime::StageOptions& options, StageKind kind) {
  const bool has_tapes = kind == StageKind::kTape;
  const std::optional<Segments> segments = cut_into_segments(graph, plan, stage, has_tapes);
  if (!segments) return (has_tapes ? runtime::make_tape_stage : runtime::make_autograd_stage)(graph, plan, stage, options);
  return runtime::make_segmented_stage(graph, *segments, runtime::stage_values(graph, plan, stage), options);
}

}  // namespace

void Programs::clear() {
  programs_.clear();
  tables_.clear();
  release_buffers();
}

std::shared_ptr<Program> Programs::find(uint64_t hash) const {
  auto found = programs_.find(hash);
  return found == programs_.end() ? nullptr : found->second;
}

void Programs::erase(uint64_t hash) {
  programs_.erase(hash);
  bool has_buffers = false;
  std::erase_if(tables_, [&](const auto& known) {
    const bool is_part = std::find(known.first.begin() + 1, known.first.end(), hash) != known.first.end();
    has_buffers = has_buffers || (is_part && !known.second.buffers.empty());
    return is_part;
  });
  if (has_buffers) release_buffers();
}

Plan Programs::make_plan(const Graph& graph, const runtime::TensorHomes& placed, int num_microbatches) const {
  check_one_copy(graph, placed);
  const auto plan_on = [&](const runtime::TensorHomes& homes) {
    const PartitionOptions options = options_on(graph, homes, num_microbatches);
    Plan plan = partition(graph, options);
    check(graph, plan);
    return plan;
  };
  const runtime::TensorHomes used = used_by(graph, placed);
  if (used.empty() || !models_.needs_placement(graph, placed)) return plan_on(used);
  // One model is new, another is not: the new one goes where a free plan of both would put it.
  return plan_on(models_.homes_after(graph, plan_on({}), placed));
}

// All of them: to count one bucket too many is the safe side.
bool Programs::shares_memory() const {
  return context_.replicas_share_memory && std::all_of(models_.all().begin(), models_.all().end(), [](const auto& model) {
           return !model->reduction.by_messages && !model->reduction.hook;
         });
}

PartitionOptions Programs::options(const Graph& graph) const {
  PartitionOptions options = options_on(graph, used_by(graph, models_.homes()), 1);
  options.behaviour.gradient_bucket_bytes = context_.config.bucket_cap_mb * (int64_t{1} << 20);
  options.behaviour.gradients_share_memory = shares_memory();
  return options;
}

std::map<std::string, int> Programs::adders(const runtime::TensorHomes& homes) const {
  std::map<std::string, int> adders;
  for (const auto& [hash, program] : programs_) {
    for (const auto& [name, ranks] : program->trained_on) {
      if (homes.contains(name)) adders[name] = ranks.front();
    }
  }
  return adders;
}

PartitionOptions Programs::options_on(const Graph& graph, const runtime::TensorHomes& homes, int num_microbatches) const {
  const Config& config = context_.config;
  PartitionOptions options;
  auto& [request, machine, behaviour, placement] = options;
  request.num_ranks = context_.pipeline->size();
  request.num_microbatches = num_microbatches;
  request.num_replicas = context_.replicas->size();
  request.chooses_visits = config.virtual_stages == kAutoVirtualStages;
  // A step whose body reads runs all forwards first.
  request.schedule = {.kind = graph.read.empty() ? schedule_kind(config.pipeline) : ScheduleKind::kSimple,
                      .active_microbatches = static_cast<int>(config.active_microbatches),
                      .virtual_stages = request.chooses_visits ? 1 : static_cast<int>(config.virtual_stages)};
  const PlannedDevice device = planned_device(context_);
  machine.device = device.model;
  request.memory_limit_bytes =
      config.memory_limit_mb > 0 ? config.memory_limit_mb * (int64_t{1} << 20) : device.memory_bytes;
  request.chooses_recomputation = config.activation_checkpointing == Checkpointing::kAuto;
  request.exact_ties = config.exact_tied_weights;
  if (config.cost == CostSource::kMeasured) machine.measured = &costs_;
  machine.rank_speed = config.rank_speed;
  for (double mebibytes : config.rank_memory_limit_mb) {
    request.rank_memory_limit_bytes.push_back(
        mebibytes > 0 ? static_cast<int64_t>(mebibytes * static_cast<double>(int64_t{1} << 20)) : -1);
  }
  behaviour.optimizer_state_factor = optimizer_.state;
  behaviour.optimizer_workspace_factor = optimizer_.workspace;
  for (const auto& model : models_.all()) {
    if (context_.replicas->size() == 1) break;
    behaviour.gradient_bucket_bytes = std::max(behaviour.gradient_bucket_bytes, model->reduction.bucket_bytes);
    behaviour.gradients_overlap = behaviour.gradients_overlap && model->reduction.overlap;
    behaviour.gradients_share_memory = shares_memory();
  }
  behaviour.num_gradient_blocks = static_cast<int>(std::max<size_t>(models_.all().size(), 1));
  behaviour.weight_gradients_wait = behaviour.repeats_a_microbatch = config.stage == StageKind::kTape;
  placement.auto_partition = config.auto_partition;
  placement.default_partition = static_cast<int>(config.default_partition);
  for (const runtime::NamedTensor& named : models_.bindings().tensors()) {
    const int stage = context_.manual_placement.stage_of(named.tensor);
    if (stage >= 0) placement.pins[named.name] = stage;
  }
  placement.known_modules = models_.module_paths();
  placement.homes = homes;
  if (request.exact_ties) placement.adders = adders(homes);
  return options;
}

std::shared_ptr<Program> Programs::add(Graph graph, Plan plan, uint64_t hash) {
  runtime::check_number_of_stages(plan);
  auto program = std::make_shared<Program>();
  ++context_.num_graphs;
  program->hash = hash;
  program->graph = std::move(graph);
  program->plan = std::move(plan);
  program->stage_graph = partitioner::stage_graph(program->plan, program->graph);
  program->written_inputs = written_inputs(program->graph);
  program->written_tensors = written_tensors(program->graph, program->plan);
  const runtime::Bindings& bindings = models_.bindings();
  for (const Value& value : program->graph.values) {
    const runtime::NamedTensor* known = is_named(value) ? bindings.find_named(value.name) : nullptr;
    TORCH_CHECK_VALUE(known != nullptr || !is_named(value), "step: expected the same model on all ranks, got the tensor '",
                      value.name, "' from the leader, which this rank's model does not have.");
    program->named_tensors.push_back(known != nullptr ? known->tensor : at::Tensor());
    if (known == nullptr) continue;
    check_same_tensor(value, known->tensor);
    program->memory_names.emplace(value.storage, bindings.first_on_storage(*known).name);
  }
  program->trained = trained_by(program->graph, program->named_tensors);
  program->trained_on = partitioner::trained_on(program->graph, program->plan);
  runtime::RankProgram& mine = program->rank_program;
  mine.graph = &program->graph;
  mine.plan = &program->plan;
  runtime::StageOptions options;
  if (context_.world->size() > 1) {
    options.progress = [this, transport = context_.world.get()] {
      transport->progress();
      for (const auto& model : models_.all()) {
        if (model->reduction.reducer) model->reduction.reducer->progress();
      }
    };
  }
  for (int s = 0; s < static_cast<int>(program->plan.stages.size()); ++s) {
    if (program->plan.stages[s].rank != context_.pipeline->rank()) continue;
    options.stays_on_autograd = [this, s](const std::string& reason) {
      context_.logger.info("stage " + std::to_string(s) + " stays on autograd: " + reason);
    };
    options.uses_graphs = context_.config.cuda_graphs == CudaGraphs::kAuto;
    options.stays_off_graphs = [this, s](const std::string& reason) {
      context_.logger.info("stage " + std::to_string(s) + " runs without CUDA graphs: " + reason);
    };
    mine.stages.emplace(s, make_stage(program->graph, program->plan, s, options, context_.config.stage));
  }
  return programs_.insert_or_assign(hash, std::move(program)).first->second;
}

const Schedule& Programs::schedule(const std::vector<Program*>& microbatches, TablePart part) {
  std::vector<uint64_t> key = {static_cast<uint64_t>(part)};
  ++num_uses_;
  for (Program* program : microbatches) {
    key.push_back(program->hash);
    program->last_use = num_uses_;
  }
  auto table = tables_.find(key);
  if (table == tables_.end()) {
    forget_least_used_tables();
    table = tables_.emplace(std::move(key), make_table(microbatches, part)).first;
    context_.buffers.reserve(table->second.buffers);
  }
  table->second.last_use = num_uses_;
  return table->second.schedule;
}

Programs::Table Programs::make_table(const std::vector<Program*>& microbatches, TablePart part) const {
  std::vector<const StageGraph*> graphs;
  for (const Program* program : microbatches) graphs.push_back(&program->stage_graph);
  const bool is_whole = part == TablePart::kWhole;
  const bool in_turn = is_whole && !write_conflict(microbatches).empty();  // one microbatch after the other
  ScheduleOptions options = microbatches.front()->plan.schedule;
  if (!is_whole) options.kind = ScheduleKind::kSimple;
  if (in_turn) {
    options.kind = ScheduleKind::kInterleaved;
    options.active_microbatches = 1;
  }
  std::optional<Schedule> given;
  if (is_whole && !in_turn) given = given_schedule(microbatches.front()->plan.table, graphs);
  Table table{.schedule = given ? std::move(*given) : generate(options, graphs), .buffers = {}};
  check(table.schedule, graphs);
  if (!is_whole) keep_only(part, table.schedule);
  const Program& first = *microbatches.front();
  const bool is_uniform = std::all_of(microbatches.begin(), microbatches.end(),
                                      [&](const Program* program) { return program->hash == first.hash; });
  Schedule& made = table.schedule;
  made.limits_sends = is_whole && is_uniform && may_limit_sends(made);
  if (is_whole && is_uniform && (first.graph.has_backward() || made.limits_sends)) {
    table.buffers =
        message_buffers(first.graph, first.plan, made, context_.pipeline->rank(), context_.config.stage == StageKind::kTape);
  }
  return table;
}

// Microbatches that take one of two paths each have as many tables as there are sequences of paths.
void Programs::forget_least_used_tables() {
  constexpr int64_t kTablesPerProgram = 8;  // wholes, and forwards from some microbatch on
  const auto max_tables = static_cast<size_t>(kTablesPerProgram * context_.config.max_cached_graphs);
  while (tables_.size() >= max_tables) {
    const auto least = std::min_element(tables_.begin(), tables_.end(),
                                        [](const auto& a, const auto& b) { return a.second.last_use < b.second.last_use; });
    const bool has_buffers = !least->second.buffers.empty();
    tables_.erase(least);
    if (has_buffers) release_buffers();
  }
}

void Programs::release_buffers() {
  std::map<int64_t, int64_t> needed;
  for (const auto& [key, table] : tables_) {
    for (const auto& [capacity, count] : table.buffers) needed[capacity] = std::max(needed[capacity], count);
  }
  context_.buffers.keep_only(needed);
}

std::vector<uint64_t> Programs::forget_least_used(size_t max_programs) {
  std::vector<uint64_t> forgotten;
  while (programs_.size() > max_programs) {
    const auto least = std::min_element(programs_.begin(), programs_.end(), [](const auto& a, const auto& b) {
      return a.second->last_use < b.second->last_use;
    });
    forgotten.push_back(least->first);
    erase(forgotten.back());
    if (++num_forgotten_ != max_programs) continue;
    context_.logger.warning(
        "step: " + std::to_string(num_forgotten_) +
        " programs have been captured and forgotten again, as many as max_cached_graphs keeps. Where shapes or branches do "
        "not come back, each microbatch is captured and planned anew, which may take longer than to train it. Pad lengths "
        "to a few, choose by where() in place of branches, or raise max_cached_graphs.");
  }
  return forgotten;
}

void Programs::add_optimizer(const OptimizerMemory& memory) {
  optimizer_.state = std::max(optimizer_.state, memory.state);
  optimizer_.workspace = std::max(optimizer_.workspace, memory.workspace);
}

}  // namespace smp::engine
