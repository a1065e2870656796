// Captures for planning only: the graphs of a step that nothing has been planned for yet.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <vector>

#include "partitioner/graph/graph.h"
#include "smp/step_call.h"

namespace smp::engine {

struct RankState;

/// The graphs of the first microbatch of a batch, by the number of parts that the batch is cut into. Captured on ghosts; a
/// capture ends where the body reads a value that needs more than the step's inputs.
class TrialCaptures {
 public:
  TrialCaptures(RankState& rank, const step_internal::Call& call) : rank_(rank), call_(call) {}

  /// Null where the batch cannot be cut so, or the body throws.
  const partitioner::Graph* graph(int64_t parts);
  /// The first microbatch of a batch that is cut into as many parts as for `graph`, by graph input.
  const std::vector<at::Tensor>& inputs_of(const partitioner::Graph* graph) const;
  /// What the body threw first.
  [[noreturn]] void rethrow() const { std::rethrow_exception(first_error_); }

 private:
  partitioner::Graph capture(const std::vector<at::Tensor>& inputs);

  RankState& rank_;
  const step_internal::Call& call_;
  struct Captured {
    partitioner::Graph graph;
    std::vector<at::Tensor> inputs;
  };
  std::map<int64_t, std::optional<Captured>> captured_;  // by parts
  std::exception_ptr first_error_;
};

}  // namespace smp::engine
