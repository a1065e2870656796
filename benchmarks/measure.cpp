// Clock, statistics and output.
#include "benchmarks/measure.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace smp::benchmarks {

double seconds_now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double seconds_of(const std::function<void()>& work) {
  const double start = seconds_now();
  work();
  return seconds_now() - start;
}

std::function<void()> repeated(int times, std::function<void()> work) {
  return [times, work = std::move(work)] {
    for (int i = 0; i < times; ++i) work();
  };
}

Comparison compare(int rounds, const std::function<void()>& first, const std::function<void()>& second) {
  constexpr int kWarmUp = 2;
  std::vector<double> firsts, seconds, ratios, extras;
  for (int round = -kWarmUp; round < rounds; ++round) {
    const bool first_leads = round % 2 == 0;
    const double a = seconds_of(first_leads ? first : second);
    const double b = seconds_of(first_leads ? second : first);
    if (round < 0) continue;
    firsts.push_back(first_leads ? a : b);
    seconds.push_back(first_leads ? b : a);
    ratios.push_back(firsts.back() / seconds.back());
    extras.push_back(firsts.back() - seconds.back());
  }
  return {median(ratios), median(firsts), median(seconds), median(extras)};
}

bool is_wanted(int argc, char** argv, const std::string& measure) { return argc < 2 || measure == argv[1]; }

void report(const std::string& name, double value, const std::string& unit,
            const std::vector<std::pair<std::string, double>>& raw) {
  std::printf("%s %.4g %s", name.c_str(), value, unit.c_str());
  const char* separator = " (";
  for (const auto& [label, figure] : raw) {
    std::printf("%s%s %.4g", separator, label.c_str(), figure);
    separator = ", ";
  }
  std::printf("%s\n", raw.empty() ? "" : ")");
  std::fflush(stdout);
}

void require(bool holds, const std::string& message) {
  if (holds) return;
  std::fprintf(stderr, "benchmark: %s\n", message.c_str());
  std::exit(1);
}

}  // namespace smp::benchmarks
