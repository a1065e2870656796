// Owns Config: every knob of a job, where its value comes from, how it is checked and printed.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace smp {

/// The order in which a pipeline runs forwards and backwards.
enum class Pipeline {
  kInterleaved,  ///< "interleaved": a backward runs as soon as it can (1F1B)
  kSimple,       ///< "simple": all forwards, then all backwards (GPipe)
};

/// How a stage runs the operators of a microbatch.
enum class StageKind {
  kAutograd,  ///< every microbatch under LibTorch's autograd
  kTape,      ///< recorded once and run without autograd, bit for bit the same; what cannot be taped runs under autograd
};

/// What ranks compute on.
enum class DeviceKind {
  kAuto,  ///< "auto": CUDA where this machine has a driver and a GPU, else the CPU
  kCpu,
  kCuda,
};

/// Whether stages on CUDA give their work to the device as CUDA graphs.
enum class CudaGraphs {
  kAuto,  ///< "auto": where a stage runs from its tape, and the tape can be recorded as graphs
  kOff,
};

/// Where the planner's times of operators come from.
enum class CostSource {
  kPredicted,  ///< "predicted": a model of the device; the same plan on every machine
  kMeasured,   ///< "measured": operators are run and timed on this machine
};

/// Who decides how many ranks form a pipeline.
enum class Parallelism {
  kManual,  ///< "manual": pipeline_parallel_degree
  kAuto,    ///< "auto": the first step, by predicted time
};

/// Who decides what runs a second time before its backward, in place of being kept.
enum class Checkpointing {
  kManual,  ///< "manual": set_activation_checkpointing() and ActivationCheckpointingGuard
  kAuto,    ///< "auto": these, and where a memory limit would be broken the planner
};

/// How often a step runs its body.
enum class Bodies {
  kEach,   ///< "each": once for each microbatch, as a plain loop does
  kAlike,  ///< "alike": once, for all of them
};

/// Config::microbatches: as many as predicted to be fastest, batch size by batch size.
inline constexpr int64_t kAutoMicrobatches = -1;

/// Config::virtual_stages: as many visits of each rank as are predicted to be faster.
inline constexpr int64_t kAutoVirtualStages = -1;

/// What an optimizer does when a loss or a gradient holds NaN or infinity; on all ranks alike.
enum class Nonfinite {
  kStop,    ///< throws, naming it, before any weight changes
  kSkip,    ///< leaves the update out and logs it
  kIgnore,  ///< updates; nothing is looked at
};

/// Which log lines reach stderr.
enum class LogLevel { kInfo, kWarning, kOff };

/// A value as JSON writes it; an enumerator is its word.
using ConfigValue = std::variant<bool, int64_t, double, std::string, std::vector<double>>;

/// Answers "what is this environment variable?"; nullopt when it is not set.
using EnvironmentLookup = std::function<std::optional<std::string>(std::string_view name)>;

/// Looks variables up in the environment of this process.
EnvironmentLookup environment_lookup();

/// Every knob: type, default, unit and constraint.  docs/configuration.md lists every key.
///
/// A value comes from the first of these that names its key: SM_HP_MP_PARAMETERS (JSON), SMP_CONFIG
/// (JSON, or the path of a JSON file), the argument of smp::init, the default below.  So the
/// environment overrides the program, key by key, as in SageMaker.  A key that is null in JSON
/// counts as not named.
///
///   smp::init({.microbatches = 4, .pipeline = smp::Pipeline::kSimple});
///   // SMP_CONFIG='{"microbatches": 8}' mpirun -np 2 ./train      8 microbatches, still "simple"
///
/// SageMaker keys that neither have a field here nor a place in without_effect belong to features that do not exist yet:
/// JSON may give them their default value, any other value is refused by name.
struct Config {
  /// Stages of one pipeline, at least 1; the world must be a multiple of it.  0 = the whole world
  /// is one pipeline.  Alias: partitions.
  int64_t pipeline_parallel_degree = 0;

  /// Whether the ranks form one pipeline, replicas of the whole model, or replicas of a shorter pipeline.  kAuto: the
  /// first step decides, by predicted time and memory_limit_mb; pipeline_parallel_degree must be 0 then.  Every rank
  /// gives a step the whole batch and gets the results of all of it; each replica works on its part (docs/automatic.md).
  Parallelism parallelism = Parallelism::kManual;

  /// Parts that a batch is split into, per pipeline; at least 1, or kAutoMicrobatches ("auto" in JSON).  The batch must
  /// divide by it.
  int64_t microbatches = 1;

  /// Most microbatches that the first stage holds at once under kInterleaved; at least 1.
  /// 0 = pipeline_parallel_degree, which is 1F1B.  SageMaker's default is pipeline_parallel_degree
  /// + 2: a deeper warm-up that costs the activations of two more microbatches.
  int64_t active_microbatches = 0;

  /// Schedule of the pipeline.
  Pipeline pipeline = Pipeline::kInterleaved;

  /// How stages run: always under autograd, or as tapes where that is possible.
  StageKind stage = StageKind::kTape;

  /// What ranks compute on, all on the same kind. A rank takes the GPU of its local rank among those that
  /// CUDA_VISIBLE_DEVICES shows; more ranks than GPUs share them.
  DeviceKind device = DeviceKind::kCpu;

  /// Whether tapes on CUDA are recorded as CUDA graphs and replayed, with the same bits. Takes memory for each microbatch in
  /// flight that stays taken between steps.
  CudaGraphs cuda_graphs = CudaGraphs::kAuto;

  /// Whether messages between ranks that are processes, each with a GPU of its own, go over NCCL; else by way of the host.
  /// Has never run between GPUs (docs/gpu.md), and so is not the default.
  bool nccl = false;

  /// Whether plans are made from predicted or from measured times. Measuring delays a step function's first step by
  /// ten microbatches or more, once for each kind of machine (docs/measured_costs.md).
  CostSource cost = CostSource::kPredicted;

  /// The kind of GPU that plans are made for, by name ("H100"), whatever this machine has: its times, and its memory where
  /// no limit is given. Empty: what ranks compute on. With predicted times only (docs/gpu.md).
  std::string planned_device = "";

  /// Folder of measured times; empty = the user's cache folder, "off" = they are not kept.
  std::string cost_cache = "";

  /// true: the planner places all modules that are not pinned.  false: they go to
  /// default_partition.
  bool auto_partition = true;

  /// Stage of the modules that are not placed by hand when auto_partition is false; at least 0 and
  /// below pipeline_parallel_degree.
  int64_t default_partition = 0;

  /// Rank layout: "cluster" (= "DPT"), "spread" (= "TPD") or a permutation of the letters D, P and
  /// T.  The right-most letter varies fastest with the world rank: "cluster" gives a pipeline
  /// neighbouring ranks.
  std::string placement_strategy = "cluster";

  /// true: replicas start every step with the buffers of dp_rank 0; false: only the first step.
  bool broadcast_buffers = true;

  /// Size at which a gradient bucket is averaged over the replicas, in MiB; at least 1.
  int64_t bucket_cap_mb = 25;

  /// true: gradients travel between replicas while the last backward goes on; false: at the end of the step. The same
  /// bits either way.
  bool overlapping_allreduce = true;

  /// Recorded graphs that each step function keeps, and planned ones that a rank keeps: one per signature (shapes, modes)
  /// and structure. The least recently used go first. At least 1.
  int64_t max_cached_graphs = 64;

  /// Memory that the planner may use on one rank, in MiB; 0 = no limit, or that of planned_device.
  int64_t memory_limit_mb = 0;

  /// The same as text, "40GiB", "1500MiB" or "2TiB"; with it memory_limit_mb is 0 or as much. Empty = memory_limit_mb
  /// counts.
  std::string memory_limit = "";

  /// The same by pipeline rank, in MiB, in place of memory_limit_mb; 0 = no limit.  Empty = equal.
  std::vector<double> rank_memory_limit_mb = {};

  /// Whether the planner makes operators run again where that keeps a rank within its memory limit, and is faster than other
  /// cuts that do. The bits stay the same.
  Checkpointing activation_checkpointing = Checkpointing::kAuto;

  /// kAlike is a promise: the microbatches of a step run the same operators with the same numbers, so that the body need not
  /// run again for each. Which microbatch it is, a body cannot tell then. One that reads values, and a microbatch of other
  /// sizes, run by themselves all the same.
  Bodies bodies = Bodies::kEach;

  /// Relative speed of each pipeline rank, above 0: {1, 0.5} gives the second rank half as much to
  /// do.  Empty = equal.
  std::vector<double> rank_speed = {};

  /// Visits of each rank by one microbatch, at least 1, or kAutoVirtualStages ("auto" in JSON).  Above
  /// 1 the planner cuts that many times as many stages and lays them round after round (Megatron's
  /// interleaved 1F1B): a smaller bubble for more messages.
  int64_t virtual_stages = 1;

  /// A weight with readers on several ranks (tied embeddings, a block called again), each of which has a copy.  true: its
  /// gradient is summed as on one process, to the bit: that of each microbatch goes from reader to reader, a message of the
  /// weight's size each time.  false: the gradients of the copies are added up once per step, to 1e-6.  With either, the
  /// later readers run in a second visit of the first rank, without copies, where that costs less than 5 % of a step more.
  bool exact_tied_weights = true;

  /// Base seed of all random operators; at least 0.
  int64_t seed = 0;

  /// Intra-operator threads of one rank; at least 1.  Another number changes the last bits of
  /// results.
  int64_t threads = 1;

  /// true: memory that tensors free stays with the process, so that the next tensors need not be mapped and cleared by the
  /// system again, which may take a third of a step (glibc only).  false: glibc's own rules.
  bool keep_memory = true;

  /// Python: smp.model_creation() makes modules as smp.delay_param_initialization() does. In C++ without effect: open the
  /// scope DelayParamInitialization.
  bool delayed_parameter_initialization = false;

  /// What DistributedOptimizer::step() does after a training step with a loss or a gradient that is not finite.
  Nonfinite nonfinite = Nonfinite::kStop;

  /// Seconds after which a wait for another rank within a step fails; above 0. Five times as many at the start, in the first
  /// call of a step function, which is measured and planned, and in all other calls.
  double timeout_s = 120;

  /// Log lines that reach stderr.
  LogLevel log_level = LogLevel::kInfo;

  /// File with the key of saves: they are signed with it, and those that are not are refused (docs/state.md). Of this user,
  /// readable by nobody else, with 32 bytes or more. Empty = no signature.
  std::string save_key_file = "";

  /// File for a Chrome trace of what every rank did in some steps; beside it, in SVG, one of them under its simulation
  /// (docs/timeline.md).  World rank 0 writes both.  Empty = no recording.
  std::string timeline = "";

  /// Steps that are recorded for `timeline`, after three that are not; at least 1.
  int64_t timeline_steps = 5;

  /// Python: smp.init makes the process groups of torch.distributed, and the model's module stands behind one more.
  /// Replicas are formed whenever the world is larger than one pipeline, with or without it.
  bool ddp = false;

  /// Port at which rank 0 listens for Python's process groups, 0 to 65535; 0 = one that the system chooses.
  int64_t ddp_port = 0;

  /// What SageMaker's keys without effect were given, by name, where it is not their default ("prescaled_batch": true). They
  /// are accepted so that SageMaker configurations run unchanged, checked and printed; docs/configuration.md lists them.
  std::map<std::string, ConfigValue> without_effect = {};

  bool operator==(const Config&) const = default;

  /// Reads one JSON object, checks it and fills the rest with defaults.  Reads no environment.
  /// Throws c10::ValueError that lists every error in the text: unknown keys with the nearest known one, ill-typed values,
  /// violated constraints, aliases that disagree, features that do not exist yet.
  static Config from_json(std::string_view text);

  /// Lays SMP_CONFIG and SM_HP_MP_PARAMETERS, as `lookup` gives them, over `argument` and checks the result. Throws
  /// c10::ValueError that lists every error of all sources, each with its source.
  static Config resolve(const Config& argument, const EnvironmentLookup& lookup = environment_lookup());

  /// As resolve, for an argument in JSON: its errors are listed together with those of the environment.
  static Config resolve_json(std::string_view argument, const EnvironmentLookup& lookup = environment_lookup());

  /// "Configuration parameters:" and one indented "key: value" line per key, in SageMaker's order.
  std::string to_text() const;

  /// One line of JSON with every key that is not of a missing feature, in a fixed order; from_json of it gives the same
  /// Config.
  std::string to_json() const;

  /// One entry "key: a's value against b's value" for every key that differs and steers something.
  static std::vector<std::string> differences(const Config& a, const Config& b);

  /// The table of all keys in Markdown, as printed in docs/configuration.md.
  static std::string reference_table();
};

}  // namespace smp
