// How long the operators of a stage take on this machine: run and timed at their real shapes.
#pragma once

#include <functional>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/stage/stage.h"

namespace smp::runtime {

struct MeasureOptions {
  bool tape = true;             // how the stage is going to run; false: under autograd
  /// Ranks of one host that run the same operators in step take more from each other than those of a pipeline do: how far
  /// this one follows the first of its host, in microbatches, 0 to 1.
  double phase = 0;
  double seconds = 0.25;        // spent on timed microbatches, of which there are four at least
  TensorLookup tensors{};       // parameters, buffers, constants and step inputs; undefined, or empty: made up
  std::vector<double> expected_backward_us{};  // by NodeId: shares of a backward that only its whole time is known of
};

/// Microseconds of one microbatch by NodeId; 0 for nodes of other stages.
struct StageTimes {
  std::vector<double> forward_us, backward_us;
};

/// Runs one stage of `plan` alone, with inputs and gradients of the shapes that its neighbours would send: a few
/// microbatches to warm up and to record the tape, then timed ones. Of these the middle half counts, by duration. No given
/// tensor is written to, and no gradient is added to a given parameter.
///
/// On a tape each leaf operator is timed by itself and counts for the operator of the graph that it belongs to, or whose
/// gradient it makes. Under autograd forwards are timed so, and the time of the backward is dealt out as the tape's is.
/// Throws what the operators throw.
StageTimes measure_stage(const partitioner::Graph& graph, const partitioner::Plan& plan, int stage,
                         const MeasureOptions& options);

}  // namespace smp::runtime
