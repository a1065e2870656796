// The slow answers for split_chain: exhaustive search and the quadratic table.
#include "tests/support/chains.h"

#include <algorithm>
#include <limits>
#include <tuple>

namespace smp::testing {

using partitioner::Chain;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

int uniform(std::mt19937& random, int low, int high) {
  return std::uniform_int_distribution<int>(low, high)(random);
}

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

/// Adds up a stage operator by operator.
class StageSum {
 public:
  StageSum(const Chain& chain, int stage, int begin)
      : chain_(chain),
        stage_(stage),
        us_(begin > 0 ? chain.receive_us[begin] : 0),
        is_allowed_(begin == 0 || chain.cut_allowed[begin]) {}

  /// Takes in operator end - 1; cost of the stage that ends here, infinity where it must not.
  double extend_to(int end) {
    const int i = end - 1;
    us_ += chain_.time_us[i];
    bytes_ += chain_.fixed_bytes[i] + chain_.stages[stage_].in_flight * chain_.activation_bytes[i];
    if (!chain_.first_stage.empty()) {
      is_allowed_ &= chain_.first_stage[i] <= stage_ && stage_ <= chain_.last_stage[i];
    }
    const int64_t limit = chain_.stages[stage_].memory_bytes;
    const bool is_last = end == chain_.num_operators();
    if (!is_allowed_ || (limit >= 0 && bytes_ > limit) || (!is_last && !chain_.cut_allowed[end])) {
      return kInfinity;
    }
    return us_ + (is_last ? 0 : chain_.send_us[end]);
  }

 private:
  const Chain& chain_;
  int stage_;
  double us_;
  int64_t bytes_ = 0;
  bool is_allowed_;
};

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
  chain.send_us.assign(time_us.size() + 1, 0);
  chain.receive_us.assign(time_us.size() + 1, 0);
  chain.cut_allowed.assign(time_us.size() + 1, 1);
  chain.stages.resize(num_stages);
  return chain;
}

Chain random_chain(std::mt19937& random, const ChainTraits& traits) {
  const int n = uniform(random, 1, traits.max_operators);
  std::vector<double> time_us(n);
  for (double& us : time_us)
    us = uniform(random, 0, 3) ? uniform(random, 0, 20) : uniform(random, 0, 90);
  Chain chain = plain_chain(time_us, uniform(random, 1, traits.max_stages));
  for (int p = 1; p < n; ++p) {
    if (traits.has_traffic) {
      chain.send_us[p] = uniform(random, 0, 12);
      chain.receive_us[p] = uniform(random, 0, 2) ? chain.send_us[p] : uniform(random, 0, 12);
    }
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

double reference_stage_us(const Chain& chain, int stage, int begin, int end) {
  StageSum sum(chain, stage, begin);
  for (int p = begin + 1; p < end; ++p) sum.extend_to(p);
  return sum.extend_to(end);
}

std::optional<ReferenceSplit> split_exhaustively(const Chain& chain) {
  const int n = chain.num_operators();
  std::optional<ReferenceSplit> best;
  std::vector<int> inner;
  do {
    if (static_cast<int>(inner.size()) >= chain.num_stages()) continue;
    ReferenceSplit split;
    split.num_used_stages = static_cast<int>(inner.size()) + 1;
    split.cuts = inner;
    split.cuts.insert(split.cuts.begin(), 0);
    split.cuts.push_back(n);
    for (int s = 0; s < split.num_used_stages; ++s) {
      const double us = reference_stage_us(chain, s, split.cuts[s], split.cuts[s + 1]);
      split.slowest_stage_us = std::max(split.slowest_stage_us, us);
    }
    if (split.slowest_stage_us == kInfinity) continue;
    for (int p : inner) split.traffic_us += chain.send_us[p] + chain.receive_us[p];
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
  std::vector<double> reached(n + 1, kInfinity);
  reached[0] = 0;
  std::optional<ReferenceSplit> best;
  for (int stage = 0; stage < chain.num_stages(); ++stage) {
    std::vector<double> next(n + 1, kInfinity);
    for (int begin = 0; begin < n; ++begin) {
      if (reached[begin] == kInfinity) continue;
      StageSum stage_sum(chain, stage, begin);
      for (int end = begin + 1; end <= n; ++end) {
        next[end] = std::min(next[end], std::max(reached[begin], stage_sum.extend_to(end)));
      }
    }
    reached = next;
    if (reached[n] < kInfinity) best = ReferenceSplit{stage + 1, reached[n], 0, {}};
  }
  return best;
}

}  // namespace smp::testing
