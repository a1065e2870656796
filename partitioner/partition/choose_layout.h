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
  double step_us = 0;        // forwards, backwards, and the averaging over the replicas
  double us_per_row = 0;     // step_us by rows of all replicas
};

struct LayoutChoice {
  size_t best = 0;  // the least time per row; of equal ones the first
  std::vector<LayoutPrediction> predictions;
};

/// The pairs (pipeline ranks, replicas) that use all of `num_ranks`, pipelines first.
std::vector<std::pair<int, int>> layouts_of(int num_ranks);

/// Divisors of `rows`, ascending, up to `most`.
std::vector<int> microbatch_counts(int64_t rows, int most);

/// Time to average `bytes` of gradients over `replicas`, one ring for each bucket: each rank sends
/// and receives 2 (R - 1) / R of them. (Patarasuk & Yuan, JPDC 2009)
double averaging_us(const DeviceModel& device, int64_t bytes, int replicas, int64_t bucket_bytes);
/// The same for the rank of `plan` with the most gradients, as measured where it was.
double averaging_us(const Plan& plan, int replicas, const PartitionOptions& options);

/// Plans every candidate under `options`, whose num_ranks, num_microbatches and
/// gradient_bucket_bytes are the candidate's (`options.gradient_bucket_bytes` counts where it has
/// replicas), and speeds and limits of ranks those of its first replica.
///
/// Throws c10::ValueError for no candidate, for numbers below 1, and when none fits into memory;
/// the text is that of the first.
LayoutChoice choose_layout(const std::vector<LayoutCandidate>& candidates, const PartitionOptions& options);

}  // namespace smp::partitioner
