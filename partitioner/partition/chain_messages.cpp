// Messages of values and gradients, as changes of the cost of stages by where they begin.
#include "partitioner/partition/chain_messages.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace smp::partitioner {

std::vector<int> stages_between(const std::vector<int>& cuts) {
  std::vector<int> stage_of;
  for (int s = 0; s + 1 < std::ssize(cuts); ++s) stage_of.resize(static_cast<size_t>(cuts[s + 1]), s);
  return stage_of;
}

ChainMessages::ChainMessages(const std::vector<Crossing>& crossings, const std::vector<int>& block_of, double grain_us)
    : changes_(static_cast<size_t>(block_of.back()) + 1) {
  for (const Crossing& crossing : crossings) {
    Crossing blocks{.made_at = block_of[crossing.made_at],
                    .read_at = {},
                    .us = std::rint(crossing.us / grain_us) * grain_us,
                    .is_relayed = crossing.is_relayed};
    int last = blocks.made_at;
    for (const int reader : crossing.read_at) {
      if (block_of[reader] != last) blocks.read_at.push_back(last = block_of[reader]);
    }
    if (!blocks.read_at.empty() && blocks.us > 0) crossings_.push_back({std::move(blocks)});
  }
  make_changes();
}

namespace {

/// What begins pay from a border on, border by border: `steps` holds where that changes.
std::vector<ChainMessages::Change> ranges_of(std::vector<std::pair<int, double>>& steps) {
  std::sort(steps.begin(), steps.end());
  std::vector<ChainMessages::Change> ranges;
  double us = 0;
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    us += steps[i].second;
    const int first = steps[i].first, last = steps[i + 1].first - 1;
    if (us != 0 && first <= last) ranges.push_back({first, last, us});
  }
  return ranges;
}

}  // namespace

/// A stage receives a value (or sends its gradient) from the first reader in it on, if the value
/// was made before it. It sends the value from where it makes it until the last reader is in it,
/// too. Of gradients, every stage that makes or reads the value receives until then.
void ChainMessages::make_changes() {
  std::vector<std::vector<std::pair<int, double>>> steps(changes_.size());  // by block
  const auto add = [&](int block, int first, int last, double us) {
    steps[block].emplace_back(first, us);
    steps[block].emplace_back(last + 1, -us);
  };
  beginning_us_.assign(changes_.size() + 1, 0);
  ending_us_.assign(changes_.size() + 1, 0);
  for (const auto& [crossing, num_sent] : crossings_) {
    const double sent_us = num_sent * crossing.us;
    ending_us_[crossing.made_at + 1] += sent_us;
    for (const int reader : crossing.read_at) beginning_us_[reader] += crossing.us;
    add(crossing.made_at, 0, crossing.made_at, sent_us);
    int before = crossing.made_at;
    for (const int reader : crossing.read_at) {
      const bool is_last = reader == crossing.read_at.back();
      const double both = crossing.is_relayed && !is_last ? 2 : 1;
      add(reader, before + 1, reader, both * crossing.us);
      if (is_last) add(reader, 0, crossing.is_relayed ? before : crossing.made_at, -sent_us);
      before = reader;
    }
  }
  for (size_t block = 0; block < steps.size(); ++block) changes_[block] = ranges_of(steps[block]);
}

std::vector<double> ChainMessages::us_by_stage(const std::vector<int>& borders) const {
  const std::vector<int> stage_of_block = stages_between(borders);
  std::vector<double> us(borders.size() - 1, 0);
  for (const auto& [crossing, num_sent] : crossings_) {
    for_each_message(crossing, stage_of_block, [&](int lower, int higher) {
      us[lower] += crossing.us;
      us[higher] += crossing.us;
    });
  }
  return us;
}

void ChainMessages::count(const std::vector<int>& borders) {
  const std::vector<int> stage_of_block = stages_between(borders);
  for (auto& [crossing, num_sent] : crossings_) {
    if (crossing.is_relayed) continue;
    int num_messages = 0;
    for_each_message(crossing, stage_of_block, [&](int, int) { ++num_messages; });
    num_sent = std::max(1, num_messages);
  }
  make_changes();
}

}  // namespace smp::partitioner
