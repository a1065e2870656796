// Memory of the gradients that a backward makes on its way.
#pragma once

#include <vector>

#include "partitioner/cost/operator_table.h"
#include "partitioner/graph/graph.h"
#include "partitioner/memory/leaving_gradients.h"

namespace smp::partitioner {

/// Lives as in LibTorch's autograd engine: a gradient dies with its last holder, and several of one value are added up.
class GradientMemory {
 public:
  GradientMemory(const Graph& graph, int64_t allocation_bytes)
      : graph_(graph), allocation_bytes_(allocation_bytes), of_value_(graph.values.size(), kNone) {}

  /// The gradient of a root, which the engine's caller keeps.
  void enter(ValueId id, ByteMeter& meter);
  bool is_there(ValueId id) const { return of_value_[static_cast<size_t>(id)] != kNone; }
  /// Adds that of input `id`, which `node` makes from the gradient of `output`.
  void pass(const Node& node, const OperatorRow& row, ValueId id, ValueId output, ByteMeter& meter);
  void forget(ValueId id, ByteMeter& meter);

 private:
  static constexpr int32_t kNone = -1;
  struct Gradient {
    int64_t bytes = 0;
    int num_holders = 0;
  };

  int32_t make(int64_t asked_bytes, ByteMeter& meter);
  int32_t made_for(const Node& node, const OperatorRow& row, ValueId id, ValueId output, ByteMeter& meter);
  void add(ValueId id, int32_t gradient, ByteMeter& meter);
  void let_go(int32_t gradient, ByteMeter& meter);

  const Graph& graph_;
  const int64_t allocation_bytes_;
  std::vector<Gradient> gradients_;
  std::vector<int32_t> of_value_;  // among gradients_
};

}  // namespace smp::partitioner
