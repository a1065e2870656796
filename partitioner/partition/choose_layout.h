// How many ranks form a pipeline, how many replicas of it there are, and into how many microbatches
// a batch is cut: compared by predicted step time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "partitioner/graph/graph.h"
#include "partitioner/partition/partition.h"
#include "partitioner/plan/plan.h"

namespace smp::partitioner {

/// One way to use the ranks.
struct LayoutCandidate {
  int pipeline_ranks = 1;
  int replicas = 1;
  int microbatches = 1;          // per replica
  int64_t rows = 1;              // of the batch of one replica
  const Graph* graph = nullptr;  // one microbatch of rows / microbatches rows; borrowed
};

struct LayoutPrediction {
  std::optional<Plan> plan;  // none where it does not fit into memory
  std::string refusal;       // then why
  double us_per_row = 0;     // the predicted step by rows of all replicas
};

struct LayoutChoice {
  size_t best = 0;  // the least time per row; of equal ones the first
  std::vector<LayoutPrediction> predictions;
};

/// The pairs (pipeline ranks, replicas) that use all of `num_ranks`, pipelines first.
std::vector<std::pair<int, int>> layouts_of(int num_ranks);

/// Divisors of `rows`, ascending, up to `most`.
std::vector<int> microbatch_counts(int64_t rows, int most);

/// Plans every candidate under `options`, whose num_ranks, num_microbatches and
/// gradient_bucket_bytes are the candidate's (that of `options` counts where it has
/// replicas), and speeds and limits of ranks those of its first replica.
///
/// Throws c10::ValueError for no candidate, for numbers below 1, and when none fits into memory;
/// the text is that of the first.
LayoutChoice choose_layout(const std::vector<LayoutCandidate>& candidates, const PartitionOptions& options);

}  // namespace smp::partitioner
