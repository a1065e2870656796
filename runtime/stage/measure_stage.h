// How long the operators of a stage take on this machine: run and timed at their real shapes.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/stage/stage.h"

namespace smp::runtime {

/// Parameters and buffers with gradients of their own, by name and whether they are copies, which may be written to: one set
/// for all measurements of a model.
using OwnTensors = std::map<std::pair<std::string, bool>, at::Tensor>;

struct MeasureOptions {
  bool tape = true;        // how the stage is going to run; false: under autograd
  TensorLookup tensors{};  // parameters, buffers, constants and step inputs; undefined, or empty: made up
  std::vector<double> expected_backward_us{};  // by NodeId: shares of a backward that only its whole time is known of
  std::shared_ptr<OwnTensors> own = std::make_shared<OwnTensors>();
};

/// Microseconds of one microbatch by NodeId; 0 for nodes of other stages.
struct StageTimes {
  std::vector<double> forward_us, backward_us;
};

/// Runs one stage of `plan` alone, with inputs and gradients of the shapes that its neighbours would send. No given tensor
/// is written to, and no gradient is added to a given parameter.
///
/// On a tape each leaf operator is timed by itself and counts for the operator of the graph that it belongs to, or whose
/// gradient it makes. Under autograd forwards are timed so, and the time of the backward is dealt out by expectation.
/// All that runs operators throws what they throw.
class StageMeasurement {
 public:
  /// `graph` and `plan` are borrowed. Runs a few microbatches, which records the tape.
  StageMeasurement(const partitioner::Graph& graph, const partitioner::Plan& plan, int stage, MeasureOptions options);
  ~StageMeasurement();
  StageMeasurement(StageMeasurement&&) noexcept;
  StageMeasurement& operator=(StageMeasurement&&) noexcept;

  /// Runs and times one microbatch, or as many as a hundredth of a second takes.
  void take_turn();
  /// Of all turns. Of the microbatches the middle half counts, by duration.
  StageTimes times() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// All of them in turns, so that a machine that changes its speed meanwhile is unjust to none: for about `seconds` each, but
/// at least sixteen turns. Behind the first it waits for `phase`, 0 to 1, of what that has taken: ranks of one host that run
/// the same operators in step take more from each other than those of a pipeline do. Returns what was thrown, by
/// measurement; one that has thrown takes no further turns.
std::vector<std::exception_ptr> measure_in_turns(std::vector<StageMeasurement>& measurements, double seconds,
                                                 double phase = 0);

}  // namespace smp::runtime
