// What goes in and out of one stage, read off a plan. Plain data; sees of floor 1 only graph and plan types.
#pragma once

#include <vector>

#include "partitioner/plan/plan.h"

namespace smp::runtime {

/// What enters and leaves one stage in one of the graph's backwards. Lists are ascending and without duplicates, save
/// that roots start with the loss.
struct BackwardValues {
  std::vector<partitioner::ValueId> roots;    // gradients that enter from outside
  std::vector<partitioner::ValueId> results;  // gradients of inputs and of relayed parameters that leave
  bool has_loss = false;                      // the backward's root is computed here; then it is roots[0]
};

/// Values of one stage by role, each list ascending and without duplicates.
struct StageValues {
  std::vector<partitioner::ValueId> inputs;   // made elsewhere: step inputs and other stages' results
  std::vector<partitioner::ValueId> outputs;  // made (or received) here and needed elsewhere, returned, or a loss
  std::vector<BackwardValues> backwards;      // by the graph's backward_roots
  bool has_backward = false;                  // one of them has a root
};

StageValues stage_values(const partitioner::Graph& graph, const partitioner::Plan& plan, int stage);

/// The stage where a value is made; inputs, and values that no stage makes: kInputStage.
int stage_of_value(const partitioner::Graph& graph, const partitioner::Plan& plan, partitioner::ValueId value);

/// Pipeline rank that holds a returned value at the end of a step: its stage's, or 0 for inputs and constants;
/// parameters and buffers: the first stage that reads them.
int rank_of_value(const partitioner::Graph& graph, const partitioner::Plan& plan, partitioner::ValueId value);

}  // namespace smp::runtime
