// A program of a job: what one microbatch runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/plan/plan.h"
#include "partitioner/schedule/stage_graph.h"
#include "runtime/executor/executor.h"

namespace smp::engine {

/// A graph with its plan, as it runs on this rank.
struct Program {
  uint64_t hash = 0;      // of the graph
  uint64_t last_use = 0;  // counts the tables asked for
  partitioner::Graph graph;
  partitioner::Plan plan;
  partitioner::StageGraph stage_graph;
  runtime::RankProgram rank_program;
  std::unordered_map<partitioner::ValueId, at::Tensor> constants;
  std::string payload;  // step_internal::Call::payload of the last step that began with it
  std::map<int, std::vector<partitioner::ValueId>> written_tensors;  // by stage: parameters and buffers
  std::vector<size_t> written_inputs;                                // positions of step inputs that an operator writes to
  std::vector<at::Tensor> named_tensors;                             // by value: parameters and buffers, undefined elsewhere
  std::unordered_map<int32_t, std::string> memory_names;  // by alias set: the first tensor of all models that lives there
  std::vector<at::Tensor> trained;                        // parameters that its backwards reach
  std::map<std::string, std::vector<int>> trained_on;     // by name, ranks that add to their gradients
};

}  // namespace smp::engine
