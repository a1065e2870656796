// One stage of a plan on its rank: forward and backward of a microbatch. Knows neither ranks nor transports.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/device/random.h"
#include "runtime/stage/stage_values.h"

namespace smp::runtime {

/// What one forward needs besides its inputs.
struct MicrobatchContext {
  int microbatch = 0;
  bool is_last = false;  // of its step
  RandomState random;
  std::vector<partitioner::ScalarOverride> scalars;  // sorted by node
};

/// How a stage has run so far.
struct StageReport {
  int64_t num_taped = 0;            // microbatches that ran from the tape
  int64_t num_replayed = 0;         // of those, as graphs of the device
  size_t num_weight_calls = 0;      // of the tape: behind the gradients that leave
  std::string stays_off_graphs{};   // why none, where they are asked for; empty: nothing speaks against it
  std::string stays_on_autograd{};  // why work that was to be taped does; empty: none does
  size_t num_on_autograd = 0;       // operators of the graph that cannot be taped, or go with one that cannot
  int64_t num_recomputed = 0;       // forwards that ran again
};

/// Parameters, buffers and constants by value; called once per value, microbatch and segment that reads it.
using TensorLookup = std::function<at::Tensor(partitioner::ValueId)>;

class Stage {
 public:
  virtual ~Stage() = default;
  virtual const StageValues& values() const = 0;
  virtual StageReport report() const { return {}; }
  /// Runs the operators. `inputs` by position in values().inputs; returns tensors by values().outputs.
  virtual std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                          const TensorLookup& tensors) = 0;
  /// Runs one backward of `microbatch`, to be called once for each of values().backwards in their order; the last one
  /// drops its state. `gradients` by position in its roots (undefined: none came); returns gradients by its results
  /// (undefined: none).
  virtual std::vector<at::Tensor> backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) = 0;
  /// Makes the gradients of parameters that the last backward of `microbatch` has left undone, so that what others wait for
  /// could leave. To be called for each microbatch behind its last backward, at any distance, in the order of microbatches.
  virtual void weight_gradients(int /*microbatch*/) {}
  /// Whether `microbatch` keeps what enters the stage alone, and computes the rest again by itself.
  virtual bool recomputes(int /*microbatch*/) const { return false; }
  /// Forgets a microbatch whose backward is not wanted.
  virtual void drop(int microbatch) = 0;
  /// Forgets all microbatches in flight, after an error.
  virtual void reset() = 0;
};

/// Told behind each leaf operator of a tape, of which operator of the graph it is a part, or of whose backward.
using OperatorTimer = std::function<void(partitioner::NodeId node, bool is_backward)>;

struct StageOptions {
  /// Called between operators, so that messages move while this rank computes. May be empty.
  std::function<void()> progress;
  /// Told each reason for which a stage, or a segment of it, stays on autograd, once. May be empty.
  std::function<void(const std::string& reason)> stays_on_autograd{};
  bool recomputes = false;   // tapes keep what enters the stage, and compute the rest again
  bool uses_graphs = false;  // tapes are recorded as graphs of the device
  /// Told why a stage that could use graphs does not, once. May be empty.
  std::function<void(const std::string& reason)> stays_off_graphs{};
  /// For measuring. May be empty.
  OperatorTimer timer{};
};

/// Runs the stage's operators under autograd: the reference implementation.
std::unique_ptr<Stage> make_autograd_stage(const partitioner::Graph& graph, const partitioner::Plan& plan, int stage,
                                           StageOptions options);

/// Records a microbatch as a tape, runs another both ways and compares every bit that leaves the stage, and runs the tape
/// from then on. What cannot be taped, or gives other bits, stays on autograd as a whole.
std::unique_ptr<Stage> make_tape_stage(const partitioner::Graph& graph, const partitioner::Plan& plan, int stage,
                                       StageOptions options);

/// `stage` of StageOptions::recomputes, which keeps what enters a microbatch and runs its forward a second time before the
/// backward, on the same numbers, with the same random ones, past what others have written since. Without backwards it is
/// `stage`.
std::unique_ptr<Stage> make_recomputing_stage(const partitioner::Graph& graph, std::unique_ptr<Stage> stage);

/// A stage in segments, which are cut around operators that no tape holds: those stay on autograd, the others are taped,
/// each by itself. `values`: of the whole.
std::unique_ptr<Stage> make_segmented_stage(const partitioner::Graph& graph, const partitioner::Segments& segments,
                                            StageValues values, StageOptions options);

}  // namespace smp::runtime
