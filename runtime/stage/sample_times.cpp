// Trimmed means and deviations.
#include "runtime/stage/sample_times.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace smp::runtime {

std::pair<size_t, size_t> middle_half(size_t count) { return {count / 4, count - count / 4}; }

double jitter_of(const std::vector<double>& times) {
  constexpr double kShareOfVariance = 0.1426;  // that the smaller half of normal numbers has
  std::vector<double> squares;
  for (size_t i = 1; i < times.size(); ++i) {
    squares.push_back(std::pow(2 * (times[i] - times[i - 1]) / (times[i] + times[i - 1]), 2));
  }
  std::sort(squares.begin(), squares.end());
  squares.resize((squares.size() + 1) / 2);
  if (squares.empty()) return 0;
  const double mean = std::accumulate(squares.begin(), squares.end(), 0.0) / static_cast<double>(squares.size());
  return std::sqrt(mean / kShareOfVariance / 2);
}

}  // namespace smp::runtime
