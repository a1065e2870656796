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
  GraphsMeasurement(const RankState& rank, const std::vector<GraphToPlan>& graphs)
      : rank_(rank), graphs_(graphs), times_(graphs.size()) {}

  /// Once. Warns, and leaves operators without a time, where they cannot be run.
  std::vector<GraphTimes> run();

 private:
  struct Part {
    size_t graph, stage;
  };

  void measure_together(const std::vector<Part>& parts);
  void warn(const std::exception_ptr& error) const;
  void keep(const Part& part, const runtime::StageTimes& of_part);
  runtime::MeasureOptions options_of(const Part& part, const std::shared_ptr<runtime::OwnTensors>& own) const;
  at::Tensor tensor_of(const partitioner::Graph& graph, const std::vector<at::Tensor>& inputs,
                       partitioner::ValueId id) const;

  const RankState& rank_;
  const std::vector<GraphToPlan>& graphs_;
  std::vector<partitioner::Plan> plans_;  // none for a graph that is not run
  std::vector<GraphTimes> times_;
};

}  // namespace smp::engine
