// The operators of whole graphs, run and timed on every rank at once.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "partitioner/cost/measured_costs.h"
#include "partitioner/plan/plan.h"
#include "runtime/stage/measure_stage.h"
#include "smp/engine/planning/auto_layout.h"

namespace smp::engine {

struct RankState;

/// By NodeId; none for operators that cannot be run like that.
using GraphTimes = std::vector<std::optional<partitioner::OperatorTime>>;

/// The graphs of a step; those without inputs run on made-up ones.
class GraphsMeasurement {
 public:
  /// Graphs are run in `least_parts` parts, one after the other, or in more where memory wants it.
  GraphsMeasurement(const RankState& rank, const std::vector<GraphToPlan>& graphs, int least_parts)
      : rank_(rank), graphs_(graphs), least_parts_(static_cast<size_t>(least_parts)), times_(graphs.size()) {}

  /// Once. Warns, and leaves operators without a time, where they cannot be run.
  std::vector<GraphTimes> run();
  /// What the smallest graph, or a part of it, has then taken on made-up numbers, the same work on all ranks: to compare their
  /// speeds by. 0: it cannot be run.
  double yardstick_us() const { return yardstick_us_; }

 private:
  struct Part {
    size_t graph, stage;
    bool is_yardstick = false;
  };

  void measure_together(const std::vector<Part>& parts);
  void warn(const std::exception_ptr& error) const;
  void keep(const Part& part, const runtime::StageTimes& of_part);
  runtime::MeasureOptions options_of(const Part& part, const std::shared_ptr<runtime::OwnTensors>& own) const;
  at::Tensor tensor_of(const partitioner::Graph& graph, const std::vector<at::Tensor>& inputs, partitioner::ValueId id) const;

  const RankState& rank_;
  const std::vector<GraphToPlan>& graphs_;
  const size_t least_parts_;
  std::vector<partitioner::Plan> plans_;  // none for a graph that is not run
  std::vector<GraphTimes> times_;
  double yardstick_us_ = 0;
};

}  // namespace smp::engine
