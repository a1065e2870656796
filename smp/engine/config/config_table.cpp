// Owns the rows of the table of configuration keys; config_key.cpp owns what is done with a row.
#include "smp/engine/config/config_table.h"

#include <algorithm>
#include <utility>

namespace smp::engine {
namespace {

constexpr double kMaxCount = 2147483647;  // counts travel as int in MPI
constexpr double kMaxMiB = 1e12;          // keeps bytes within int64_t
constexpr double kMaxSeconds = 1e9;       // keeps nanoseconds within int64_t
constexpr Range kCount{.least = 1, .most = kMaxCount};
constexpr Range kCountOrZero{.least = 0, .most = kMaxCount};
constexpr Range kMebibytes{.least = 1, .most = kMaxMiB};
constexpr Range kMebibytesOrZero{.least = 0, .most = kMaxMiB};
constexpr Range kNotNegative{.least = 0};
constexpr Range kFraction{.least = 0, .most = 1};
constexpr Range kPort{.least = 0, .most = 65535};
constexpr Range kAboveZero{.least = 0, .most = 1e9, .excludes_least = true};
constexpr Range kWaitSeconds{.least = 0, .most = kMaxSeconds, .excludes_least = true};

constexpr bool kPrinted = true, kUnprinted = false;

/// A key that steers nothing here, and so has no field in Config.
Key without_field(std::string_view name, ConfigValue value, Support support, bool is_printed, std::string_view meaning) {
  return {.name = name,
          .value_without_field = std::move(value),
          .support = support,
          .is_printed = is_printed,
          .meaning = meaning};
}

std::vector<Key> make_keys() {
  const auto not_yet = Support::kNotYet;
  const auto no_effect = Support::kNoEffect;
  return {
      // SageMaker's printed list, in its order.
      {.name = "pipeline_parallel_degree",
       .alias = "partitions",
       .field = &Config::pipeline_parallel_degree,
       .is_used_by_init = true,
       .range = kCountOrZero,
       .meaning = "Stages of one pipeline; the world must be a multiple of it. 0 = the whole world is one pipeline "
                  "(SageMaker requires the key)."},
      {.name = "microbatches",
       .field = &Config::microbatches,
       .range = kCount,
       .word_for_auto = "auto",
       .meaning = "Parts that a batch is split into, per pipeline. The batch must divide by it. `auto`: as many as are "
                  "predicted to be fastest."},
      {.name = "pipeline",
       .field = &Config::pipeline,
       .choices = {"interleaved", "simple"},
       .meaning =
           "Schedule: `interleaved` runs a backward as soon as it can (1F1B), `simple` runs all forwards first (GPipe)."},
      without_field("horovod", false, not_yet, kPrinted, "TensorFlow only."),
      {.name = "ddp",
       .field = &Config::ddp,
       .meaning = "Python: process groups of torch.distributed, and one more module around the model's. Replicas are formed "
                  "whenever the world is larger than one pipeline, with or without it."},
      without_field("tensor_parallel_degree", int64_t{1}, not_yet, kPrinted, "Ranks of one tensor-parallel group."),
      {.name = "ddp_port",
       .field = &Config::ddp_port,
       .range = kPort,
       .meaning = "Port at which rank 0 listens for Python's process groups; 0 = one that the system chooses."},
      without_field("ddp_dist_backend", std::string("auto"), no_effect, kPrinted, "Backend of torch.distributed."),
      without_field("contiguous", true, no_effect, kPrinted, "TensorFlow only."),
      {.name = "placement_strategy",
       .field = &Config::placement_strategy,
       .is_used_by_init = true,
       .choices = {"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"},
       .meaning =
           "Rank layout; the right-most letter varies fastest with the world rank. `cluster` = `DPT`, `spread` = `TPD`."},
      {.name = "optimize",
       .value_without_field = std::string("memory"),
       .choices = {"memory", "speed"},
       .support = no_effect,
       .meaning = "Layout of SageMaker's tensor-parallel layers."},
      {.name = "default_partition",
       .field = &Config::default_partition,
       .range = kCountOrZero,
       .meaning = "Stage of the modules that are not placed by hand when `auto_partition` is false; below "
                  "`pipeline_parallel_degree`."},
      {.name = "auto_partition",
       .field = &Config::auto_partition,
       .meaning = "true: the planner places all modules that are not pinned; false: they go to `default_partition`."},
      without_field("prescaled_batch", false, no_effect, kPrinted,
                    "With one tensor-parallel rank a batch is its own scaled batch."),
      {.name = "memory_weight",
       .value_without_field = 0.0,
       .range = kFraction,
       .support = no_effect,
       .meaning = "SageMaker's weight of memory against compute (its default: 0.8, or 0.2 with `optimize` = `speed`). Our "
                  "planner minimises step time under `memory_limit_mb`."},
      {.name = "active_microbatches",
       .field = &Config::active_microbatches,
       .range = kCountOrZero,
       .meaning = "Most microbatches that the first stage holds at once under `interleaved`. 0 = "
                  "`pipeline_parallel_degree`, which is 1F1B; SageMaker's default is `pipeline_parallel_degree` + 2."},
      without_field("fp16_params", false, no_effect, kPrinted, "Half-precision parameters of tensor-parallel layers."),
      without_field("tensor_parallel_seed", int64_t{0}, no_effect, kPrinted, "Seed of tensor-parallel initialisation."),
      without_field("offload_activations", false, no_effect, kPrinted,
                    "A CPU has nowhere to move them to, and on GPUs what recomputation keeps stays there."),
      without_field("shard_optimizer_state", false, not_yet, kPrinted, "Shards the optimizer state over the replicas."),
      without_field("skip_tracing", false, no_effect, kPrinted, "The capture takes milliseconds and is never skipped."),
      without_field("activation_loading_horizon", int64_t{4}, no_effect, kPrinted,
                    "Pipeline tasks ahead of which offloaded activations are loaded back."),
      // Ours.
      {.name = "parallelism",
       .field = &Config::parallelism,
       .is_used_by_init = true,
       .choices = {"manual", "auto"},
       .is_printed = false,
       .meaning = "`auto`: the first step chooses between one pipeline, replicas, and replicas of a shorter pipeline; every "
                  "rank gives each step the whole batch."},
      {.name = "stage",
       .field = &Config::stage,
       .choices = {"autograd", "tape"},
       .is_printed = false,
       .meaning =
           "`autograd`: stages run under LibTorch's autograd. `tape`: a stage is recorded once, down to leaf operators, and "
           "then runs without autograd, with the same bits; what cannot be taped stays on autograd, which the log says."},
      {.name = "device",
       .field = &Config::device,
       .is_used_by_init = true,
       .choices = {"auto", "cpu", "cuda"},
       .is_printed = false,
       .meaning = "What ranks compute on: `cuda` is the GPU of a rank's local rank, `auto` is that where there is one, else "
                  "the CPU."},
      {.name = "cuda_graphs",
       .field = &Config::cuda_graphs,
       .choices = {"auto", "off"},
       .is_printed = false,
       .meaning =
           "`auto`: tapes of stages on CUDA are recorded as CUDA graphs and replayed, with the same bits, where that is "
           "possible."},
      {.name = "nccl",
       .field = &Config::nccl,
       .is_used_by_init = true,
       .is_printed = false,
       .meaning = "true: messages between stages go over NCCL where each rank is a process with a GPU of its own, which has "
                  "never run ([GPUs](gpu.md#verified)); false: by way of the host."},
      {.name = "cost",
       .field = &Config::cost,
       .choices = {"predicted", "measured"},
       .is_printed = false,
       .meaning = "Times that plans are made from: `predicted` by a model of the device, or `measured` on this machine "
                  "before a step function's first step."},
      {.name = "planned_device",
       .field = &Config::planned_device,
       .is_used_by_init = true,
       .is_printed = false,
       .meaning =
           "The kind of GPU that plans are made for, with its times and its memory, whatever this machine has: `H100` "
           "([names](gpu.md#plans)). Empty = what ranks compute on. With predicted times only."},
      {.name = "cost_cache",
       .field = &Config::cost_cache,
       .is_printed = false,
       .meaning = "Folder where measured times are kept from job to job; empty = the user's cache folder, \"off\" = they "
                  "are not kept."},
      {.name = "broadcast_buffers",
       .field = &Config::broadcast_buffers,
       .meaning = "true: replicas start every step with the buffers of dp_rank 0; false: only the first step."},
      {.name = "bucket_cap_mb",
       .field = &Config::bucket_cap_mb,
       .range = kMebibytes,
       .meaning = "Size in MiB at which a gradient bucket is averaged over the replicas."},
      {.name = "overlapping_allreduce",
       .field = &Config::overlapping_allreduce,
       .is_printed = false,
       .meaning = "true: gradients travel between replicas while the last backward goes on; false: at the end of the step. "
                  "The same bits either way."},
      {.name = "max_cached_graphs",
       .field = &Config::max_cached_graphs,
       .range = kCount,
       .meaning = "Graphs (one per signature and structure) kept by each step function and each rank; the least recently "
                  "used go first."},
      {.name = "memory_limit_mb",
       .field = &Config::memory_limit_mb,
       .range = kMebibytesOrZero,
       .meaning = "Memory in MiB that the planner may use on one rank; 0 = no limit, or that of `planned_device`."},
      {.name = "memory_limit",
       .field = &Config::memory_limit,
       .is_printed = false,
       .meaning = "The same as text: `40GiB`, `1500MiB`, `2TiB`."},
      {.name = "rank_memory_limit_mb",
       .field = &Config::rank_memory_limit_mb,
       .range = kMebibytesOrZero,
       .meaning = "The same for each pipeline rank, in place of `memory_limit_mb`: [4000, 2000]."},
      {.name = "activation_checkpointing",
       .field = &Config::activation_checkpointing,
       .choices = {"manual", "auto"},
       .is_printed = false,
       .meaning =
           "`auto`: where a memory limit would be broken, operators run again in the backward, so that what they make "
           "need not be kept, if that is faster than other cuts within the limit; `manual`: only what "
           "`set_activation_checkpointing` and its kin mark. The same bits either way."},
      {.name = "bodies",
       .field = &Config::bodies,
       .choices = {"each", "alike"},
       .is_printed = false,
       .meaning =
           "`each`: the body runs for each microbatch, as in a plain loop. `alike`: it runs once per step, and you promise "
           "that all microbatches run the same operators with the same numbers beside their tensors "
           "([steps](steps.md#one-body-for-all-microbatches))."},
      {.name = "rank_speed",
       .field = &Config::rank_speed,
       .range = kAboveZero,
       .meaning = "Relative speed of each pipeline rank: [1, 0.5] gives the second half as much to do. Empty = equal."},
      {.name = "exact_tied_weights",
       .field = &Config::exact_tied_weights,
       .is_printed = false,
       .meaning = "true: the gradient of a weight with readers on several ranks goes from reader to reader for each "
                  "microbatch, exact to the bit; false: it is added up once per step, exact but for the last bits."},
      {.name = "virtual_stages",
       .field = &Config::virtual_stages,
       .range = {.least = 1, .most = 64},
       .word_for_auto = "auto",
       .meaning = "Visits of each rank by one microbatch; above 1 `interleaved` is Megatron's interleaved 1F1B: a smaller "
                  "bubble for more messages. `auto`: more than one where that is predicted to be faster."},
      {.name = "seed", .field = &Config::seed, .range = kNotNegative, .meaning = "Base seed of all random operators."},
      {.name = "threads",
       .field = &Config::threads,
       .range = kCount,
       .meaning = "Intra-operator threads of one rank. Another number changes the last bits of results."},
      {.name = "keep_memory",
       .field = &Config::keep_memory,
       .is_used_by_init = true,
       .is_printed = false,
       .meaning = "true: memory that tensors free stays with the process, so that the system need not map and clear it "
                  "again for the next ones (glibc only); false: the C library decides."},
      {.name = "nonfinite",
       .field = &Config::nonfinite,
       .choices = {"stop", "skip", "ignore"},
       .is_printed = false,
       .meaning = "What an optimizer does when a loss or a gradient holds NaN or infinity, on all ranks alike: `stop` "
                  "throws before any weight changes, `skip` leaves the update out, `ignore` looks at nothing."},
      {.name = "timeout_s",
       .field = &Config::timeout_s,
       .range = kWaitSeconds,
       .meaning = "Seconds after which a wait for another rank within a step fails; five times as many at the start, in the "
                  "first call of a step function, and in all other calls."},
      {.name = "log_level",
       .field = &Config::log_level,
       .choices = {"info", "warning", "off"},
       .meaning = "Log lines that reach stderr."},
      {.name = "save_key_file",
       .field = &Config::save_key_file,
       .is_printed = false,
       .meaning =
           "File with a key, of this user alone and of 32 bytes or more: saves are signed with it, and those that are not "
           "are refused. Empty = no signature."},
      {.name = "timeline",
       .field = &Config::timeline,
       .is_used_by_init = true,
       .is_printed = false,
       .meaning = "File for a Chrome trace of what every rank did, with a drawing beside it: `trace.json` and `trace.svg`. "
                  "Empty = no recording."},
      {.name = "timeline_steps",
       .field = &Config::timeline_steps,
       .range = kCount,
       .is_printed = false,
       .meaning = "Steps that `timeline` records, after the first three."},
      // SageMaker keys that it does not print.
      without_field("deterministic_server", false, no_effect, kUnprinted, "Every order of execution is deterministic here."),
      without_field("_match_weights", false, no_effect, kUnprinted, "Internal key of SageMaker."),
      without_field("_fp32_grad_accumulation", false, no_effect, kUnprinted,
                    "Internal key of SageMaker: float32 gradients are accumulated in float32 anyway."),
      {.name = "trace_device",
       .value_without_field = std::string("gpu"),
       .choices = {"gpu", "cpu"},
       .support = no_effect,
       .is_printed = false,
       .meaning = "Where SageMaker traces the model. The capture runs on tensors without data."},
      without_field("fp16", false, not_yet, kUnprinted, "Half-precision training."),
      without_field("bf16", false, not_yet, kUnprinted, "bfloat16 training."),
      {.name = "delayed_parameter_initialization",
       .field = &Config::delayed_parameter_initialization,
       .is_printed = false,
       .meaning = "Python: modules made in `smp.model_creation()` get their values in the first step, each parameter on its "
                  "own rank. Everywhere else, and in C++, the scope around the construction says so."},
      without_field(
          "checkpoint_attentions", false, no_effect, kUnprinted,
          "Of tensor-parallel layers, which there are none of: mark the module with `set_activation_checkpointing`."),
      {.name = "sharded_data_parallel_degree",
       .value_without_field = int64_t{1},
       .also_accepted = int64_t{0},
       .support = not_yet,
       .is_printed = false,
       .meaning = "Ranks over which parameters are sharded; 0 and 1 are off."},
      without_field("sdp_reduce_bucket_size", int64_t{500'000'000}, no_effect, kUnprinted,
                    "Sharded data parallelism: elements of one reduction."),
      without_field("sdp_param_persistence_threshold", int64_t{1'000'000}, no_effect, kUnprinted,
                    "Sharded data parallelism: smaller parameters are replicated."),
      without_field("sdp_max_live_parameters", int64_t{1'000'000'000}, no_effect, kUnprinted,
                    "Sharded data parallelism: most elements gathered at once."),
      without_field("sdp_hierarchical_allgather", true, no_effect, kUnprinted,
                    "Sharded data parallelism: gathers within a host first."),
      without_field("sdp_gradient_clipping", 1.0, no_effect, kUnprinted, "Sharded data parallelism: largest gradient norm."),
      without_field("load_partition", false, not_yet, kUnprinted, "Reads the partition from a file."),
      without_field("partition_file", std::string(), no_effect, kUnprinted,
                    "File of the partition that `load_partition` reads."),
      without_field("static_mode", false, not_yet, kUnprinted, "Undocumented mode of SageMaker's runtime."),
      without_field("fast_mode", false, not_yet, kUnprinted, "Undocumented mode of SageMaker's runtime."),
  };
}

}  // namespace

const std::vector<Key>& config_keys() {
  static const std::vector<Key> keys = make_keys();
  return keys;
}

bool is_used_by_init(std::string_view key, const Config& config) {
  if (key == "ddp" || key == "ddp_port") return config.ddp;  // Python's process groups
  if (key == "timeline_steps") return !config.timeline.empty();
  return std::ranges::any_of(config_keys(), [&](const Key& each) { return each.name == key && each.is_used_by_init; });
}

}  // namespace smp::engine
