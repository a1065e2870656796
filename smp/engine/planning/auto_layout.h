// What configurations leave to smp: into how many microbatches a batch is cut, and how many ranks form a pipeline.
#pragma once

#include <cstdint>
#include <vector>

#include "partitioner/graph/graph.h"
#include "smp/step_call.h"

namespace smp::engine {

struct RankState;

/// How ranks work on a batch.
struct Layout {
  int pipeline_ranks = 1;
  int replicas = 1;
  int64_t microbatches = 1;  // of one replica
};

/// The share of a batch that this leader's replica takes. With microbatches=auto the number of microbatches is chosen when
/// the step function gets a batch of that many rows for the first time: the body is captured once for every number that
/// divides them (up to 32), on ghosts and for nothing but its graph, and the one whose plan is predicted to be the fastest
/// is kept. Such a capture ends where the body reads a value that needs more than the step's inputs; a body that throws
/// rules its number out. Throws what the body threw when that rules all out, and c10::ValueError when no argument is cut.
step_internal::Share share_of(RankState& rank, int step_number, const step_internal::Call& call);

struct GraphToPlan {
  partitioner::Graph graph;
  std::vector<at::Tensor> inputs;  // of the first such microbatch, by graph input
};

/// The graphs of one microbatch each that planning this step may have to choose between; none where the body throws. On
/// world rank 0.
std::vector<GraphToPlan> graphs_to_plan(RankState& rank, const step_internal::Call& call);

/// parallelism=auto, in the first step: world rank 0 compares all layouts in the same way, all ranks take the best. A
/// refusal is thrown by all of them, and leaves things as they were. Collective over the world.
void lay_out(RankState& rank, int step_number, const step_internal::Call& call);

}  // namespace smp::engine
