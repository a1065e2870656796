// Shortest path over (block, rank).
#include "partitioner/partition/visits.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <numeric>

namespace smp::partitioner {
namespace {

constexpr double kForbidden = std::numeric_limits<double>::infinity();

/// Relaxes every rank by the cheapest lower one (`direction` 1) or the cheapest higher one (-1).
void relax(const std::vector<double>& before_us, double change_us, int direction, std::vector<double>& cost_us,
           std::vector<int>& previous_rank) {
  const int num_ranks = static_cast<int>(before_us.size());
  int cheapest = direction > 0 ? 0 : num_ranks - 1;
  for (int rank = cheapest + direction; rank >= 0 && rank < num_ranks; rank += direction) {
    if (before_us[cheapest] + change_us < cost_us[rank]) {
      cost_us[rank] = before_us[cheapest] + change_us;
      previous_rank[rank] = cheapest;
    }
    if (before_us[rank] < before_us[cheapest]) cheapest = rank;
  }
}

}  // namespace

std::vector<int> cheapest_ranks(const std::vector<RankSet>& allowed, const std::vector<double>& switch_us,
                                double step_back_us, int num_ranks) {
  const size_t num_blocks = allowed.size();
  std::vector<double> cost_us(num_ranks, 0);  // of the best way that ends on each rank
  std::vector<std::vector<int>> previous_rank(num_blocks, std::vector<int>(num_ranks));
  for (size_t b = 0; b < num_blocks; ++b) {
    std::iota(previous_rank[b].begin(), previous_rank[b].end(), 0);
    if (b > 0) {
      const std::vector<double> before_us = cost_us;
      relax(before_us, switch_us[b], 1, cost_us, previous_rank[b]);
      relax(before_us, switch_us[b] + step_back_us, -1, cost_us, previous_rank[b]);
    }
    if (allowed[b].empty()) continue;
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (!std::binary_search(allowed[b].begin(), allowed[b].end(), rank)) cost_us[rank] = kForbidden;
    }
  }
  const auto best = std::min_element(cost_us.begin(), cost_us.end());
  TORCH_INTERNAL_ASSERT(*best < kForbidden, "every block has an allowed rank");
  std::vector<int> rank_of_block(num_blocks);
  int rank = static_cast<int>(best - cost_us.begin());
  for (size_t b = num_blocks; b-- > 0;) {
    rank_of_block[b] = rank;
    rank = previous_rank[b][rank];
  }
  return rank_of_block;
}

}  // namespace smp::partitioner
