// The slow answers for split_chain: exhaustive search and the quadratic table.
#include "tests/support/chains.h"

#include <algorithm>
#include <limits>
#include <set>
#include <tuple>

namespace smp::testing {

using partitioner::Chain;
using partitioner::Crossing;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int uniform(std::mt19937& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

void add_random_pins(std::mt19937& random, Chain& chain) {
  const int n = chain.num_operators(), num_stages = chain.num_stages();
  chain.first_stage.assign(n, 0);
  chain.last_stage.assign(n, num_stages - 1);
  const int num_pins = uniform(random, 1, 3);
  for (int i = 0; i < num_pins; ++i) {
    const int at = uniform(random, 0, n - 1);
    const int stage = std::clamp(at * num_stages / n + uniform(random, -1, 1), 0, num_stages - 1);
    chain.first_stage[at] = std::max(0, stage - uniform(random, 0, 1));
    chain.last_stage[at] = stage;
  }
}

/// Every operator's result goes to the next, and now and then further.
void add_random_crossings(std::mt19937& random, int most_readers, Chain& chain) {
  for (int i = 0; i + 1 < chain.num_operators(); ++i) {
    const int num_more = uniform(random, 0, 2) ? 0 : uniform(random, 1, 3);
    std::vector<int> readers;
    if (num_more == 0 || uniform(random, 0, 1)) readers.push_back(i + 1);
    for (int k = 0; k < num_more; ++k) readers.push_back(uniform(random, i + 1, chain.num_operators() - 1));
    std::sort(readers.begin(), readers.end());
    chain.crossings.push_back({i, readers, static_cast<double>(uniform(random, 0, 12)), true});
    std::shuffle(readers.begin(), readers.end(), random);
    readers.resize(std::min<size_t>(readers.size(), static_cast<size_t>(most_readers)));
    std::sort(readers.begin(), readers.end());
    chain.crossings.push_back({i, readers, static_cast<double>(uniform(random, 0, 12)), false});
  }
}

/// What [begin, end) pays for the messages of one value, if the stage that makes it sends it once.
double least_message_us(const Crossing& crossing, int begin, int end) {
  const auto is_here = [&](int i) { return begin <= i && i < end; };
  const bool is_made_here = is_here(crossing.made_at);
  const bool is_read_here = std::any_of(crossing.read_at.begin(), crossing.read_at.end(), is_here);
  const bool is_read_later = crossing.read_at.back() >= end;
  double us = 0;
  if (crossing.made_at < begin && is_read_here) us += crossing.us;
  if (is_read_later && (is_made_here || (crossing.is_relayed && is_read_here))) us += crossing.us;
  return us;
}

/// By operator: what it makes and reads.
std::vector<std::vector<const Crossing*>> crossings_by_operator(const Chain& chain) {
  std::vector<std::vector<const Crossing*>> touched(chain.time_us.size());
  for (const Crossing& crossing : chain.crossings) {
    touched[crossing.made_at].push_back(&crossing);
    for (size_t i = 0; i < crossing.read_at.size(); ++i) {
      const int reader = crossing.read_at[i];
      if (i == 0 || reader != crossing.read_at[i - 1]) touched[reader].push_back(&crossing);
    }
  }
  return touched;
}

/// Adds up a stage operator by operator.
class StageSum {
 public:
  StageSum(const Chain& chain, const std::vector<std::vector<const Crossing*>>& touched, int stage, int begin)
      : chain_(chain),
        touched_(touched),
        stage_(stage),
        begin_(begin),
        is_allowed_(begin == 0 || chain.cut_allowed[begin]) {}

  /// Takes in operator end - 1; cost of the stage that ends here, infinity where it must not.
  double extend_to(int end) {
    const int i = end - 1;
    us_ += chain_.time_us[i] * chain_.stages[stage_].slowness;
    for (const Crossing* crossing : touched_[i]) {
      message_us_ += least_message_us(*crossing, begin_, end) - least_message_us(*crossing, begin_, i);
    }
    bytes_ += chain_.fixed_bytes[i] + chain_.stages[stage_].in_flight * chain_.activation_bytes[i];
    if (!chain_.first_stage.empty()) {
      is_allowed_ &= chain_.first_stage[i] <= stage_ && stage_ <= chain_.last_stage[i];
    }
    const int64_t limit = chain_.stages[stage_].memory_bytes;
    const bool is_last = end == chain_.num_operators();
    if (!is_allowed_ || (limit >= 0 && bytes_ > limit) || (!is_last && !chain_.cut_allowed[end])) {
      return kInfinity;
    }
    return us_ + message_us_;
  }
  double message_us() const { return message_us_; }

 private:
  const Chain& chain_;
  const std::vector<std::vector<const Crossing*>>& touched_;
  int stage_;
  int begin_;
  double us_ = 0;
  double message_us_ = 0;
  int64_t bytes_ = 0;
  bool is_allowed_;
};

/// What the values of [cuts[stage], cuts[stage + 1]) that several later stages read cost beyond one message.
double repeated_message_us(const Chain& chain, const std::vector<int>& cuts, int stage) {
  double us = 0;
  for (const Crossing& crossing : chain.crossings) {
    if (crossing.is_relayed || crossing.made_at < cuts[stage] || crossing.made_at >= cuts[stage + 1]) continue;
    std::set<int> targets;
    for (const int reader : crossing.read_at) {
      targets.insert(static_cast<int>(std::upper_bound(cuts.begin(), cuts.end(), reader) - cuts.begin()) - 1);
    }
    targets.erase(stage);
    if (!targets.empty()) us += crossing.us * static_cast<double>(targets.size() - 1);
  }
  return us;
}

/// The split of `cuts`: its slowest stage and the messages of all, each value sent once but for the former.
ReferenceSplit cost_of(const Chain& chain, const std::vector<int>& cuts) {
  const auto touched = crossings_by_operator(chain);
  ReferenceSplit split{static_cast<int>(cuts.size()) - 1, 0, 0, cuts};
  for (int s = 0; s < split.num_used_stages; ++s) {
    StageSum sum(chain, touched, s, cuts[s]);
    double us = 0;
    for (int p = cuts[s] + 1; p <= cuts[s + 1]; ++p) us = sum.extend_to(p);
    split.slowest_stage_us = std::max(split.slowest_stage_us, us + repeated_message_us(chain, cuts, s));
    split.traffic_us += sum.message_us();
  }
  return split;
}

bool visit_next_cut(std::vector<int>& cuts,
                    int n) {  // next subset of {1, ..., n - 1} as a sorted list
  for (int p = n - 1; p >= 1; --p) {
    const auto at = std::lower_bound(cuts.begin(), cuts.end(), p);
    if (at == cuts.end() || *at != p) {
      cuts.insert(cuts.erase(at, cuts.end()), p);
      return true;
    }
  }
  return false;
}

}  // namespace

Chain plain_chain(const std::vector<double>& time_us, int num_stages) {
  Chain chain;
  chain.time_us = time_us;
  chain.fixed_bytes.assign(time_us.size(), 0);
  chain.activation_bytes.assign(time_us.size(), 0);
  chain.cut_allowed.assign(time_us.size() + 1, 1);
  chain.stages.resize(num_stages);
  return chain;
}

Chain random_chain(std::mt19937& random, const ChainTraits& traits) {
  const int n = uniform(random, 1, traits.max_operators);
  std::vector<double> time_us(n);
  for (double& us : time_us) us = uniform(random, 0, 3) ? uniform(random, 0, 20) : uniform(random, 0, 90);
  Chain chain = plain_chain(time_us, uniform(random, 1, traits.max_stages));
  if (traits.has_traffic) add_random_crossings(random, traits.most_readers, chain);
  for (int p = 1; p < n; ++p) {
    if (traits.has_forbidden_cuts) chain.cut_allowed[p] = uniform(random, 0, 3) > 0;
  }
  if (traits.has_memory_limits && uniform(random, 0, 1)) {
    for (int i = 0; i < n; ++i) {
      chain.fixed_bytes[i] = uniform(random, 0, 30);
      chain.activation_bytes[i] = uniform(random, 0, 10);
    }
    const int limit = uniform(random, 10, 40 * n / chain.num_stages() + 40);
    for (int s = 0; s < chain.num_stages(); ++s) {
      chain.stages[s] = {chain.num_stages() - s, limit + uniform(random, 0, 5)};
    }
  }
  if (traits.has_pins && uniform(random, 0, 2) == 0) add_random_pins(random, chain);
  return chain;
}

double reference_slowest_us(const Chain& chain, const std::vector<int>& cuts) {
  return cost_of(chain, cuts).slowest_stage_us;
}

std::optional<ReferenceSplit> split_exhaustively(const Chain& chain) {
  const int n = chain.num_operators();
  std::optional<ReferenceSplit> best;
  std::vector<int> inner;
  do {
    if (static_cast<int>(inner.size()) >= chain.num_stages()) continue;
    std::vector<int> cuts = inner;
    cuts.insert(cuts.begin(), 0);
    cuts.push_back(n);
    const ReferenceSplit split = cost_of(chain, cuts);
    if (split.slowest_stage_us == kInfinity) continue;
    const auto key = [](const ReferenceSplit& s) {
      return std::tuple(-s.num_used_stages, s.slowest_stage_us, s.traffic_us,
                        std::vector<int>(s.cuts.rbegin(), s.cuts.rend()));
    };
    if (!best || key(split) < key(*best)) best = split;
  } while (visit_next_cut(inner, n));
  return best;
}

std::optional<ReferenceSplit> split_by_table(const Chain& chain) {
  const int n = chain.num_operators();
  const auto touched = crossings_by_operator(chain);
  std::vector<double> reached(n + 1, kInfinity);
  reached[0] = 0;
  std::optional<ReferenceSplit> best;
  for (int stage = 0; stage < chain.num_stages(); ++stage) {
    std::vector<double> next(n + 1, kInfinity);
    for (int begin = 0; begin < n; ++begin) {
      if (reached[begin] == kInfinity) continue;
      StageSum stage_sum(chain, touched, stage, begin);
      for (int end = begin + 1; end <= n; ++end) {
        next[end] = std::min(next[end], std::max(reached[begin], stage_sum.extend_to(end)));
      }
    }
    reached = next;
    if (reached[n] < kInfinity) best = ReferenceSplit{stage + 1, reached[n], 0, {}};
  }
  return best;
}

double lower_bound_us(const Chain& chain) {
  double speed = 0, fastest = 0, total_us = 0, heaviest_us = 0;
  for (const auto& stage : chain.stages) {
    speed += 1 / stage.slowness;
    fastest = std::max(fastest, 1 / stage.slowness);
  }
  for (const double us : chain.time_us) {
    total_us += us;
    heaviest_us = std::max(heaviest_us, us);
  }
  return std::max(total_us / speed, heaviest_us / fastest);
}

}  // namespace smp::testing
