// Context: construction, checks between ranks, and how a thread finds it.
#include "smp/engine/context/context.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/transport/shared_memory.h"

namespace smp::engine {
namespace {

std::shared_ptr<Context> process_context;  // set by init, cleared by shutdown
thread_local Context* thread_context = nullptr;
std::string why_absent = "Call smp::init() first in main(), on every rank.";

Config with_degree(Config config, int world_size) {
  if (config.pipeline_parallel_degree == 0) config.pipeline_parallel_degree = world_size;
  return config;
}

runtime::Topology make_topology(const Config& config, int world_size, int64_t pipeline_ranks) {
  return runtime::Topology(world_size, {.pipeline_degree = static_cast<int>(pipeline_ranks)}, config.placement_strategy);
}

constexpr double kLongWait = 5;  // times as long

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

std::chrono::milliseconds long_timeout(const Config& config) { return milliseconds(kLongWait * config.timeout_s); }

Context::Context(Config resolved, const runtime::Launch& launched, std::shared_ptr<runtime::Transport> transport)
    : config(with_degree(std::move(resolved), transport->size())),
      launch(launched),
      topology(make_topology(config, transport->size(), config.pipeline_parallel_degree)),
      world(std::move(transport)),
      calls(world),
      is_laid_out(config.parallelism == Parallelism::kManual),
      logger(config.log_level) {
  form_groups();
}

void Context::form_groups() {
  pipeline = world->group(topology.group(runtime::GroupKind::kPipeline, world->rank()));
  replicas = world->group(topology.group(runtime::GroupKind::kDataParallel, world->rank()));
  shards = world->group(topology.group(runtime::GroupKind::kTensor, world->rank()));
  constexpr int64_t kTrialBytes = 4096;
  runtime::Transport& averaging = is_laid_out ? *replicas : *world;
  const bool is_host = runtime::this_ranks_device().type == runtime::host().type;
  replicas_share_memory = is_host && averaging.size() > 1 && runtime::SharedMemory::make(averaging, kTrialBytes) != nullptr;
}

Context::~Context() = default;

LongWaits::LongWaits(const Context& context) : context_(context) {
  context_.world->set_timeout(long_timeout(context_.config));
}
LongWaits::~LongWaits() {
  if (context_.has_started) context_.world->set_timeout(milliseconds(context_.config.timeout_s));
}

void Context::lay_out(int pipeline_ranks) {
  config.pipeline_parallel_degree = pipeline_ranks;
  topology = make_topology(config, world->size(), pipeline_ranks);
  is_laid_out = true;
  form_groups();
}

void Context::check_laid_out(runtime::GroupKind which, const char* caller) const {
  TORCH_CHECK(is_laid_out || which == runtime::GroupKind::kWorld, caller, ": expected a call after the first step, which ",
              "with parallelism=auto decides which ranks form a pipeline, got one before it. With parallelism=auto every "
              "rank gives each step the whole batch: no sampler needs to know its replica.");
}

// Without tensor parallelism a replica is one pipeline.
runtime::Transport& Context::group(runtime::GroupKind which) const {
  switch (which) {
    case runtime::GroupKind::kWorld:
      return *world;
    case runtime::GroupKind::kDataParallel:
    case runtime::GroupKind::kReducedData:
      return *replicas;
    case runtime::GroupKind::kPipeline:
    case runtime::GroupKind::kModelParallel:
      return *pipeline;
    case runtime::GroupKind::kTensor:
      return *shards;
  }
  TORCH_INTERNAL_ASSERT(false, "unknown group");
}

Context* try_context() { return thread_context != nullptr ? thread_context : process_context.get(); }

Context& context(const char* caller) {
  Context* found = try_context();
  TORCH_CHECK(found != nullptr, caller, ": expected smp::init() to have been called, got no context. ", why_absent);
  // LibTorch's current device is the thread's, and a program may take its steps on another one than smp::init.
  thread_local const Context* uses_device_of = nullptr;
  if (std::exchange(uses_device_of, found) != found) runtime::this_ranks_device().use(found->device.index);
  return *found;
}

void explain_absence(std::string text) { why_absent = std::move(text); }

void refuse_in_body(std::string_view caller) {
  refuse_in_body(caller, "Call it on every rank, before or after the step function.");
}

void refuse_in_body(std::string_view caller, std::string_view fix) {
  const Context* own = try_context();
  TORCH_CHECK_VALUE(own == nullptr || own->body_in_progress == nullptr, caller,
                    ": expected a call outside of step bodies, got one from within a body. ", fix);
}

void refuse_in_join(std::string_view caller) {
  const Context* own = try_context();
  TORCH_CHECK_VALUE(own == nullptr || !own->join, caller, ": expected a call outside of smp::join, got one from its loop. ",
                    "All replicas do this together, and the others may have left the loop. Call it after smp::join.");
}

void set_process_context(std::shared_ptr<Context> context) {
  // A program that ends without smp::shutdown: before what the libraries of a device, loaded later than this one, destroy.
  static const int at_exit = std::atexit([] { process_context.reset(); });
  TORCH_INTERNAL_ASSERT(at_exit == 0);
  process_context = std::move(context);
}

ThreadContext::ThreadContext(Context* context) : previous_(thread_context) {
  thread_context = context;
  // OpenMP and MKL keep the number of threads per thread, and it changes bits.
  at::set_num_threads(static_cast<int>(context->config.threads));
  runtime::this_ranks_device().use(context->device.index);
}
ThreadContext::~ThreadContext() { thread_context = previous_; }

}  // namespace smp::engine
