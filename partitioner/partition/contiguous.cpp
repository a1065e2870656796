// Exact contiguous split: merge what may not be cut, bound the slowest stage from below, search above that.
#include "partitioner/partition/contiguous.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <optional>

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

/// Where the search begins: about the least limit that the bounds of the cuts do not exclude.
double first_limit_us(ChainProbe& probe, const BlockChain& blocks) {
  double too_low_us = 0, limit_us = std::ldexp(blocks.grain_us, 51);  // no stage costs more (grain_of)
  for (int i = 0; i < 24; ++i) {
    const double middle_us = too_low_us + (limit_us - too_low_us) / 2;
    (probe.may_reach(middle_us) ? limit_us : too_low_us) = middle_us;
  }
  return limit_us;
}

/// What the slowest stage of the fastest split takes; `probe` has the cuts then. Any limit that some split keeps is enough
/// to find the fastest, and the closer it is the less is searched: it grows from `limit_us` on until there is one.
double find_optimum(ChainProbe& probe, double limit_us) {
  std::optional<double> slowest_us = probe.least(Aim::kSlowestStage, limit_us);
  for (double step_us = limit_us / 256; !slowest_us; step_us *= 2) {
    TORCH_INTERNAL_ASSERT(limit_us < kInfinity, "some split exists");
    slowest_us = probe.least(Aim::kSlowestStage, limit_us += step_us);
  }
  TORCH_INTERNAL_ASSERT(probe.least(Aim::kTraffic, *slowest_us));
  return *slowest_us;
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
std::vector<int> best_borders(BlockChain& blocks, int num_stages, ChainSplit& split) {
  ChainProbe probe(blocks, num_stages);
  split.least_us = find_optimum(probe, first_limit_us(probe, blocks));
  std::vector<int> first = probe.cuts();
  split.slowest_stage_us = slowest_of(blocks, first);
  if (split.slowest_stage_us <= split.least_us) return first;
  blocks.messages.count(first);
  find_optimum(probe, split.slowest_stage_us);
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

  ChainSplit split;
  split.num_used_stages = num_stages;
  const std::vector<int> borders = best_borders(blocks, num_stages, split);
  for (const int border : borders) split.cuts.push_back(positions[border]);
  split.cuts.resize(chain.num_stages() + 1, chain.num_operators());
  return split;
}

}  // namespace smp::partitioner
