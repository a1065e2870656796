// One plan per candidate.
#include "partitioner/partition/choose_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>

namespace smp::partitioner {
namespace {

void check_candidate(const LayoutCandidate& candidate) {
  const bool is_valid = candidate.pipeline_ranks >= 1 && candidate.replicas >= 1 && candidate.microbatches >= 1 &&
                        candidate.rows >= candidate.microbatches && candidate.graph != nullptr;
  TORCH_CHECK_VALUE(
      is_valid,
      "choose_layout: expected ranks, replicas and microbatches of at least 1, a row for each microbatch, and a graph, got ",
      candidate.pipeline_ranks, " ranks, ", candidate.replicas, " replicas, ", candidate.microbatches, " microbatches, ",
      candidate.rows, " rows.");
}

PartitionOptions options_for(const LayoutCandidate& candidate, PartitionOptions options) {
  const auto ranks = static_cast<size_t>(candidate.pipeline_ranks);
  const auto of_first_replica = [ranks](auto& by_rank) { by_rank.resize(std::min(by_rank.size(), ranks)); };
  options.request.num_ranks = candidate.pipeline_ranks;
  options.request.num_microbatches = candidate.microbatches;
  options.request.num_replicas = candidate.replicas;
  if (candidate.replicas == 1) options.behaviour.gradient_bucket_bytes = 0;
  of_first_replica(options.machine.rank_speed);
  of_first_replica(options.request.rank_memory_limit_bytes);
  return options;
}

LayoutPrediction predict(const LayoutCandidate& candidate, const PartitionOptions& given) {
  const PartitionOptions options = options_for(candidate, given);
  LayoutPrediction prediction;
  try {
    prediction.plan = partition(*candidate.graph, options);
  } catch (const c10::ValueError& error) {
    prediction.refusal = error.what_without_backtrace();
    return prediction;
  }
  prediction.us_per_row = prediction.plan->predicted_step_us / static_cast<double>(candidate.rows * candidate.replicas);
  return prediction;
}

}  // namespace

std::vector<std::pair<int, int>> layouts_of(int num_ranks) {
  std::vector<std::pair<int, int>> layouts;
  for (int ranks = num_ranks; ranks >= 1; --ranks) {
    if (num_ranks % ranks == 0) layouts.emplace_back(ranks, num_ranks / ranks);
  }
  return layouts;
}

std::vector<int> microbatch_counts(int64_t rows, int most) {
  std::vector<int> counts;
  for (int count = 1; count <= std::min<int64_t>(most, rows); ++count) {
    if (rows % count == 0) counts.push_back(count);
  }
  return counts;
}

LayoutChoice choose_layout(const std::vector<LayoutCandidate>& candidates, const PartitionOptions& options) {
  TORCH_CHECK_VALUE(!candidates.empty(), "choose_layout: expected a candidate, got none.");
  for (const LayoutCandidate& candidate : candidates) check_candidate(candidate);
  LayoutChoice choice;
  bool is_any = false;
  for (size_t i = 0; i < candidates.size(); ++i) {
    choice.predictions.push_back(predict(candidates[i], options));
    const LayoutPrediction& last = choice.predictions.back();
    if (!last.plan) continue;
    if (!is_any || last.us_per_row < choice.predictions[choice.best].us_per_row) choice.best = i;
    is_any = true;
  }
  TORCH_CHECK_VALUE(is_any, choice.predictions.front().refusal);
  return choice;
}

}  // namespace smp::partitioner
