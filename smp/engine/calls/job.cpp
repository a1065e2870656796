// Start and end of a job, and who this process is in it.
#include "smp/engine/calls/job.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include "runtime/capture/interceptor.h"
#include "runtime/device/device.h"
#include "runtime/device/process_memory.h"
#include "runtime/exchange/root_cause.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/linked_transport.h"
#include "runtime/transport/staged_transport.h"
#include "runtime/transport/world.h"
#include "runtime/watch/termination.h"
#include "smp/engine/config/config_draft.h"
#include "smp/engine/config/config_table.h"
#include "smp/engine/context/call.h"
#include "smp/engine/context/rank_device.h"
#include "smp/engine/engine.h"
#include "smp/engine/groups/made_group.h"
#include "smp/engine/optimizers/optimizer_settings.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/engine/timeline/step_timeline.h"
#include "smp/init.h"

namespace smp::engine {
namespace {

// One collective, and everybody sees the same texts, so everybody throws or nobody does.
void check_same_config(const Config& own, runtime::Transport& world) {
  const std::vector<std::string> configs = world.all_gather(own.to_json());
  for (size_t r = 1; r < configs.size(); ++r) {
    std::string text;
    for (const std::string& line : Config::differences(Config::from_json(configs[0]), Config::from_json(configs[r]))) {
      text += (text.empty() ? "" : "; ") + line;
    }
    TORCH_CHECK_VALUE(text.empty(), "smp::init: expected the same configuration on all ranks, got a difference between ",
                      "rank 0 and rank ", r, ": ", text, ". Give all ranks the same argument and environment.");
  }
}

void check_fits(const Config& own, int world_size) {
  const auto stages = own.pipeline_parallel_degree == 0 ? world_size : own.pipeline_parallel_degree;
  TORCH_CHECK_VALUE(own.default_partition < stages, "smp::init: expected default_partition below ",
                    "pipeline_parallel_degree=", stages, ", got ", own.default_partition, ". Name a stage from 0 to ",
                    stages - 1, ", or raise pipeline_parallel_degree.");
  const auto check_per_rank = [&](const char* key, const std::vector<double>& numbers) {
    TORCH_CHECK_VALUE(numbers.empty() || static_cast<int64_t>(numbers.size()) == stages, "smp::init: expected ", key,
                      " to have one number for each of ", stages, " pipeline ranks, got ", numbers.size(), ". Give ", stages,
                      " numbers or none.");
  };
  check_per_rank("rank_speed", own.rank_speed);
  check_per_rank("rank_memory_limit_mb", own.rank_memory_limit_mb);
}

// The configuration in force, under what a second call of smp::init names.
template <class Lay>
Config in_force_under(const Context& own, const Lay& lay) {
  Config in_force = own.config;
  // A degree that nobody has named excludes parallelism=auto.
  if (in_force.parallelism == Parallelism::kAuto) in_force.pipeline_parallel_degree = 0;
  ConfigDraft draft;
  draft.lay("smp::init before", in_force);
  lay(draft);
  return draft.finish_under(environment_lookup());
}

void take_over(Context& own, const Config& named) {
  Config wanted = named;
  if (wanted.pipeline_parallel_degree == 0) wanted.pipeline_parallel_degree = own.config.pipeline_parallel_degree;
  std::string late;
  const std::vector<std::string> differences = Config::differences(own.config, wanted);
  for (const std::string& line : differences) {
    if (own.rank_state == nullptr && !is_used_by_init(line.substr(0, line.find(':')), own.config)) continue;
    late += (late.empty() ? "" : "; ") + line;
  }
  TORCH_CHECK_VALUE(
      late.empty(), "smp::init: expected a second call to leave keys as they are that have had an effect, ",
      own.rank_state == nullptr ? "" : "all of them where there is a model, ", "got other values for ", late,
      " (in force against named). Give them to the first call, which in Python may have been an import of "
      "transformers: in SM_HP_MP_PARAMETERS or SMP_CONFIG, or by calling smp::init before. Or leave them out here.");
  if (!differences.empty()) {
    refuse_in_body("smp::init");
    refuse_in_join("smp::init");
    check_fits(wanted, own.world->size());
    in_call(own, "init", runtime::GroupKind::kWorld, [&] { check_same_config(named, *own.world); });
    at::set_num_threads(static_cast<int>(wanted.threads));
    own.logger = Logger(wanted.log_level);
  }
  own.config = wanted;
}

std::string describe_doing(const Context& context) {
  const RankState* rank = context.rank_state.get();
  const std::string steps = rank == nullptr ? "no step" : std::to_string(rank->training_steps) + " training steps";
  if (context.call.empty()) return "is outside of smp's calls after " + steps;
  const std::string part = rank == nullptr ? "" : rank->executor->describe();
  return "is in " + std::string(context.call) + " after " + steps + (part.empty() ? "" : ": " + part);
}

}  // namespace

std::shared_ptr<Context> make_context(const Config& resolved, const runtime::Launch& launch,
                                      std::shared_ptr<runtime::Transport> world, const std::string& software) {
  const std::string different = differing_versions(world->all_gather(software));
  TORCH_CHECK_VALUE(different.empty(), "smp::init: expected the same software on all ranks, got: ", different,
                    ". Install the same on all hosts.");
  check_same_config(resolved, *world);
  check_fits(resolved, world->size());
  // Rank 0 writes it.
  const std::string own = world->rank() == 0 ? timeline_complaint(resolved.timeline) : "";
  const std::string complaint = resolved.timeline.empty() ? "" : world->all_gather(own).front();
  TORCH_CHECK_VALUE(complaint.empty(), complaint);
  const RankDevice device = take_device(resolved, launch, *world, Logger(resolved.log_level));
  const std::shared_ptr<runtime::Transport> joined = world;
  if (!world->moves_memory_of(runtime::this_ranks_device().type)) {
    world = device.links != nullptr ? runtime::make_linked(std::move(world), *device.links)
                                    : runtime::make_staged(std::move(world));
  }
  auto made = std::make_shared<Context>(resolved, launch, std::move(world));
  made->joined = joined;
  made->device = device;
  made->made_groups = std::make_shared<MadeGroups>(made->world);
  if (!made->config.timeline.empty()) made->timeline = std::make_shared<StepTimeline>(*made);
  made->world->describe_by([own = std::weak_ptr<Context>(made)] {
    const auto alive = own.lock();
    return alive ? describe_doing(*alive) : "";
  });
  return made;
}

void init_again(std::string_view text) {
  Context& own = context("smp::init");
  take_over(own, in_force_under(own, [&](ConfigDraft& draft) { draft.lay_json("argument", text); }));
}

}  // namespace smp::engine

namespace smp {
namespace {

using engine::context;
using runtime::GroupKind;

// Of this rank.
int rank_in(GroupKind kind, const char* caller) {
  const auto& own = context(caller);
  own.check_laid_out(kind, caller);
  return own.topology.group_rank(kind, own.world->rank());
}
int size_of(GroupKind kind, const char* caller) {
  const auto& own = context(caller);
  own.check_laid_out(kind, caller);
  return own.topology.group_size(kind);
}
std::vector<int> members_of(GroupKind kind, const char* caller) {
  const auto& own = context(caller);
  own.check_laid_out(kind, caller);
  return own.topology.group(kind, own.world->rank());
}

}  // namespace

void init(const Config& argument) {
  if (engine::Context* const own = engine::try_context()) {
    using engine::ConfigDraft;
    return engine::take_over(*own,
                             engine::in_force_under(*own, [&](ConfigDraft& draft) { draft.lay("argument", argument); }));
  }
  runtime::install_terminate_handler(/*rank=*/0, /*is_alone=*/true);
  const runtime::Launch launch = with_exit_code(ExitCode::kUsage, [] { return runtime::detect_launch(); });
  runtime::install_terminate_handler(launch.rank, !launch.has_others());
  // A configuration with errors is the same on all ranks in nearly every job, so each says so by itself, before they meet.
  const Config resolved = with_exit_code(ExitCode::kUsage, [&] { return Config::resolve(argument); });
  std::shared_ptr<runtime::Transport> world = runtime::join_world(launch, engine::long_timeout(resolved));
  runtime::install_terminate_handler(world);
  if (resolved.keep_memory) runtime::keep_freed_memory();
  at::set_num_threads(static_cast<int>(resolved.threads));
  runtime::install_interceptor();
  auto made = with_exit_code(ExitCode::kUsage, [&] { return engine::make_context(resolved, launch, std::move(world)); });
  if (made->world->rank() == 0) made->logger.info(made->config.to_text());
  engine::set_process_context(std::move(made));
}

void shutdown() {
  engine::refuse_in_body("smp::shutdown");
  engine::refuse_in_join("smp::shutdown");
  auto& own = context("smp::shutdown");
  // The last model of this rank may be gone while others have theirs.
  const std::string optimizers = own.rank_state ? engine::describe_optimizers(*own.rank_state) : "";
  engine::in_call(own, "shutdown", GroupKind::kWorld, [&] {
    engine::check_same_optimizers(*own.world, optimizers, "rank ", "smp::shutdown");
    own.world->settle();
    own.world->barrier();
    if (own.timeline) own.timeline->finish();
  });
  const auto world = own.joined;
  const runtime::Launch launch = own.launch;
  engine::set_process_context(nullptr);
  runtime::leave_world(launch, *world);
}

bool stop_requested() {
  engine::refuse_in_body("smp::stop_requested");
  engine::refuse_in_join("smp::stop_requested");
  auto& own = context("smp::stop_requested");
  runtime::expect_stop_signals();
  return engine::in_call(own, "stop_requested", GroupKind::kWorld, [&] {
    const auto num_asked = std::make_shared<int64_t>(runtime::is_stop_signalled() ? 1 : 0);
    runtime::keeping(num_asked, [&] { own.world->all_reduce_sum(num_asked.get(), 1, c10::ScalarType::Long); });
    return *num_asked > 0;
  });
}

bool is_initialized() { return engine::try_context() != nullptr; }

const Config& config() { return context("smp::config").config; }

int rank() { return context("smp::rank").world->rank(); }
int size() { return context("smp::size").world->size(); }
int local_rank() { return context("smp::local_rank").launch.local_rank; }
std::string engine::device_type() { return c10::DeviceTypeName(runtime::this_ranks_device().type, /*lower_case=*/true); }

int engine::launched_local_size() { return runtime::detect_launch().local_size; }
int local_size() { return context("smp::local_size").launch.local_size; }
int pp_rank() { return rank_in(GroupKind::kPipeline, "smp::pp_rank"); }
int pp_size() { return size_of(GroupKind::kPipeline, "smp::pp_size"); }
int dp_rank() { return rank_in(GroupKind::kDataParallel, "smp::dp_rank"); }
int dp_size() { return size_of(GroupKind::kDataParallel, "smp::dp_size"); }
int mp_rank() { return rank_in(GroupKind::kModelParallel, "smp::mp_rank"); }
int mp_size() { return size_of(GroupKind::kModelParallel, "smp::mp_size"); }
int tp_rank() { return rank_in(GroupKind::kTensor, "smp::tp_rank"); }
int tp_size() { return size_of(GroupKind::kTensor, "smp::tp_size"); }
int rdp_rank() { return rank_in(GroupKind::kReducedData, "smp::rdp_rank"); }
int rdp_size() { return size_of(GroupKind::kReducedData, "smp::rdp_size"); }

std::vector<int> get_world_group() { return members_of(GroupKind::kWorld, "smp::get_world_group"); }
std::vector<int> get_mp_group() { return members_of(GroupKind::kModelParallel, "smp::get_mp_group"); }
std::vector<int> get_dp_group() { return members_of(GroupKind::kDataParallel, "smp::get_dp_group"); }
std::vector<int> get_pp_group() { return members_of(GroupKind::kPipeline, "smp::get_pp_group"); }
std::vector<int> get_tp_group() { return members_of(GroupKind::kTensor, "smp::get_tp_group"); }
std::vector<int> get_rdp_group() { return members_of(GroupKind::kReducedData, "smp::get_rdp_group"); }

}  // namespace smp
