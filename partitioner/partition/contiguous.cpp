// Exact contiguous split: merge what may not be cut, parametric search over the slowest stage.
#include "partitioner/partition/contiguous.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>

#include "partitioner/partition/chain_probe.h"

namespace smp::partitioner {
namespace {

void check_lengths(const Chain& chain) {
  const size_t n = chain.time_us.size();
  TORCH_INTERNAL_ASSERT(n >= 1 && !chain.stages.empty() && chain.cut_allowed.size() == n + 1);
  TORCH_INTERNAL_ASSERT(chain.fixed_bytes.size() == n && chain.activation_bytes.size() == n);
  TORCH_INTERNAL_ASSERT(chain.first_stage.empty() || chain.first_stage.size() == n);
  TORCH_INTERNAL_ASSERT(chain.first_stage.size() == chain.last_stage.size());
}

/// Positions 0 and n and every allowed cut between them: the borders of the blocks.
std::vector<int> allowed_positions(const Chain& chain) {
  std::vector<int> positions{0};
  for (int p = 1; p < chain.num_operators(); ++p) {
    if (chain.cut_allowed[p]) positions.push_back(p);
  }
  positions.push_back(chain.num_operators());
  return positions;
}

void merge_pins(const Chain& chain, const std::vector<int>& positions, BlockChain& blocks) {
  for (size_t block = 0; block + 1 < positions.size(); ++block) {
    int first = 0, last = chain.num_stages() - 1;
    for (int i = positions[block]; i < positions[block + 1]; ++i) {
      first = std::max(first, chain.first_stage[i]);
      last = std::min(last, chain.last_stage[i]);
    }
    blocks.first_stage.push_back(first);
    blocks.last_stage.push_back(last);
  }
}

/// 2^-50 of what a split can cost at most: sums of its multiples are exact.
double grain_of(const Chain& chain) {
  double us = 0, slowness = 1;
  for (const auto& stage : chain.stages) slowness = std::max(slowness, stage.slowness);
  for (const double time_us : chain.time_us) us += time_us * slowness;
  for (const Crossing& crossing : chain.crossings) {
    us += crossing.us * 4 * static_cast<double>(crossing.read_at.size() + 1);
  }
  return us > 0 ? std::ldexp(1.0, std::ilogb(us) - 50) : 1;
}

std::vector<int> blocks_of_operators(const std::vector<int>& positions) {
  std::vector<int> block_of;
  for (int block = 0; block + 1 < std::ssize(positions); ++block) {
    block_of.resize(static_cast<size_t>(positions[block + 1]), block);
  }
  return block_of;
}

BlockChain merge_blocks(const Chain& chain, const std::vector<int>& positions) {
  const double grain_us = grain_of(chain);
  BlockChain blocks{.grain_us = grain_us,
                    .prefix_us = {},
                    .prefix_fixed_bytes = {},
                    .prefix_activation_bytes = {},
                    .first_stage = {},
                    .last_stage = {},
                    .stages = chain.stages,
                    .messages = {chain.crossings, blocks_of_operators(positions), grain_us}};
  double prefix_us = 0;
  int64_t fixed_bytes = 0, activation_bytes = 0;
  int done = 0;
  for (int p : positions) {
    for (; done < p; ++done) {
      prefix_us += std::rint(chain.time_us[done] / grain_us) * grain_us;
      fixed_bytes += chain.fixed_bytes[done];
      activation_bytes += chain.activation_bytes[done];
    }
    blocks.prefix_us.push_back(prefix_us);
    blocks.prefix_fixed_bytes.push_back(fixed_bytes);
    blocks.prefix_activation_bytes.push_back(activation_bytes);
  }
  if (!chain.first_stage.empty()) merge_pins(chain, positions, blocks);
  return blocks;
}

/// The least number of bytes by which every limited stage must grow until some split fits.
int64_t smallest_sufficient_growth(BlockChain blocks) {
  const auto limits = blocks.stages;
  auto feasible = [&](int64_t growth) {
    for (size_t s = 0; s < limits.size(); ++s) {
      if (limits[s].memory_bytes >= 0) blocks.stages[s].memory_bytes = limits[s].memory_bytes + growth;
    }
    return largest_feasible_stage_count(blocks) > 0;
  };
  int64_t too_small = 0, enough = 1;
  for (; !feasible(enough); enough *= 2) too_small = enough;
  while (too_small + 1 < enough) {
    const int64_t middle = too_small + (enough - too_small) / 2;
    (feasible(middle) ? enough : too_small) = middle;
  }
  return enough;
}

BlockChain without_memory_limits(BlockChain blocks) {
  for (auto& limits : blocks.stages) limits.memory_bytes = -1;
  return blocks;
}

/// Shrinks [lower, upper] until they meet. Lower is always a value below which probes fail, and a failed probe names the
/// next value that can matter; upper is what some split costs, once one is known: good splits are close to the lower bound,
/// so it is approached in growing steps until then.
double find_optimum(ChainProbe& probe, double lower_us, double upper_us) {
  double limit_us = lower_us, step_us = 0;
  while (lower_us < upper_us) {
    if (probe.reaches(limit_us)) {
      upper_us = probe.slowest_us();  // <= limit_us < the upper bound before
    } else {
      lower_us = std::max(lower_us, probe.next_candidate_us());
      TORCH_INTERNAL_ASSERT(lower_us < kInfinity, "some split exists");
    }
    step_us = std::max(2 * step_us, lower_us / 256);
    limit_us = upper_us == kInfinity ? lower_us + step_us : lower_us + (upper_us - lower_us) / 2;
    if (limit_us >= upper_us) limit_us = lower_us;
  }
  TORCH_INTERNAL_ASSERT(probe.reaches(upper_us));
  return upper_us;
}

/// The best that `num_stages` stages can do: all equally busy, or the heaviest operator on the fastest.
double least_us(const Chain& chain, double total_us, double heaviest_us, int num_stages) {
  double speed = 0, slowness = kInfinity;
  for (int s = 0; s < num_stages; ++s) {
    speed += 1 / chain.stages[s].slowness;
    slowness = std::min(slowness, chain.stages[s].slowness);
  }
  return std::max(total_us / speed, heaviest_us * slowness);
}

double heaviest(const std::vector<double>& prefix_us) {
  double us = 0;
  for (size_t p = 1; p < prefix_us.size(); ++p) us = std::max(us, prefix_us[p] - prefix_us[p - 1]);
  return us;
}

double slowest_of(const BlockChain& blocks, const std::vector<int>& borders) {
  const std::vector<double> messages_us = blocks.messages.us_by_stage(borders);
  double us = 0;
  for (int s = 0; s < std::ssize(messages_us); ++s) {
    const double work_us = blocks.work_until_us(s, borders[s + 1]) - blocks.work_until_us(s, borders[s]);
    us = std::max(us, work_us + messages_us[s]);
  }
  return us;
}

/// The borders of the better of two splits; fills in what is known of it.
std::vector<int> best_borders(BlockChain& blocks, int num_stages, double search_from_us, ChainSplit& split) {
  ChainProbe probe(blocks, num_stages);
  split.least_us = find_optimum(probe, search_from_us, kInfinity);
  std::vector<int> first = probe.cuts();
  split.slowest_stage_us = slowest_of(blocks, first);
  if (split.slowest_stage_us <= split.least_us) return first;
  blocks.messages.count(first);
  find_optimum(probe, split.least_us, split.slowest_stage_us);
  const double us = slowest_of(blocks, probe.cuts());
  if (us >= split.slowest_stage_us) return first;
  split.slowest_stage_us = us;
  return probe.cuts();
}

}  // namespace

bool pins_leave_a_split(const Chain& chain) {
  check_lengths(chain);
  const BlockChain blocks = merge_blocks(chain, allowed_positions(chain));
  return largest_feasible_stage_count(without_memory_limits(blocks)) > 0;
}

int64_t smallest_memory_growth(const Chain& chain) {
  check_lengths(chain);
  const BlockChain blocks = merge_blocks(chain, allowed_positions(chain));
  return largest_feasible_stage_count(blocks) > 0 ? 0 : smallest_sufficient_growth(blocks);
}

ChainSplit split_chain(const Chain& chain) {
  check_lengths(chain);
  const std::vector<int> positions = allowed_positions(chain);
  BlockChain blocks = merge_blocks(chain, positions);
  const int num_stages = largest_feasible_stage_count(blocks);
  TORCH_INTERNAL_ASSERT(num_stages > 0, "pins or limits leave no split");

  const double total_us = blocks.prefix_us.back();
  // Not above the optimum even by rounding: the search may end at its lower bound only through a probe.
  const double search_from_us = least_us(chain, total_us, heaviest(blocks.prefix_us), num_stages) * (1 - 1e-12);
  ChainSplit split;
  split.num_used_stages = num_stages;
  const std::vector<int> borders = best_borders(blocks, num_stages, search_from_us, split);
  for (const int border : borders) split.cuts.push_back(positions[border]);
  split.cuts.resize(chain.num_stages() + 1, chain.num_operators());
  return split;
}

}  // namespace smp::partitioner
