// smp_doctor, which `smp doctor` starts on every rank: what a job would run on, how fast messages are, and what is likely to
// be wrong. Ends with 1 where something is.
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "smp/smp.h"
#include "smp/version.h"
#include "tools/checks/facts.h"

namespace {

using namespace smp::tools;
using Clock = std::chrono::steady_clock;

constexpr double kMiB = 1 << 20, kGiB = 1 << 30;
constexpr size_t kSmall = 8, kLarge = 4 << 20;  // bytes
constexpr int kSmallRounds = 50, kLargeRounds = 5;

// Half of the median round trip, on both.
double one_way_s(int own, int other, size_t num_bytes, int num_rounds) {
  const std::string content(num_bytes, 'x');
  std::vector<double> seconds;
  for (int round = 0; round < num_rounds; ++round) {
    const auto begin = Clock::now();
    if (own < other) smp::send(content, other, smp::WORLD_RANK);
    smp::recv_from<std::string>(other, smp::WORLD_RANK);
    if (own > other) smp::send(content, other, smp::WORLD_RANK);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - begin).count() / 2);
  }
  std::nth_element(seconds.begin(), seconds.begin() + num_rounds / 2, seconds.end());
  return seconds[static_cast<size_t>(num_rounds / 2)];
}

// Neighbours, and the first ranks of all hosts with each other.
std::vector<std::pair<int, int>> pairs_of(const std::vector<Facts>& ranks) {
  std::vector<std::pair<int, int>> pairs;
  std::map<std::string, int> first_of;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (rank > 0) pairs.emplace_back(rank - 1, rank);
    if (!first_of.emplace(ranks[static_cast<size_t>(rank)].host, rank).second) continue;
    for (const auto& [host, first] : first_of)
      if (first < rank - 1) pairs.emplace_back(first, rank);
  }
  return pairs;
}

void print_hosts(const std::vector<Facts>& ranks) {
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const Facts& facts = ranks[rank];
    std::string addresses;
    for (const std::string& address : facts.addresses) addresses += (addresses.empty() ? "" : ", ") + address;
    std::printf("rank %zu on %s: %lld cores, %.1f GiB of memory, %.0f MiB in /dev/shm, %lld open files, %s\n", rank,
                facts.host.c_str(), static_cast<long long>(facts.num_cores), static_cast<double>(facts.memory_bytes) / kGiB,
                static_cast<double>(facts.shared_bytes) / kMiB, static_cast<long long>(facts.num_files),
                addresses.empty() ? "no network" : addresses.c_str());
  }
}

}  // namespace

int main() {
  smp::init({.log_level = smp::LogLevel::kWarning});
  const bool is_first = smp::rank() == 0;
  smp::barrier();
  const std::vector<Facts> ranks = smp::allgather(facts_of_this_host(), smp::CommGroup::WORLD);
  if (is_first) {
    std::printf("smp %s, LibTorch %s, %d ranks\n", smp::version(), TORCH_VERSION, smp::size());
    print_hosts(ranks);
  }
  for (const auto& [first, second] : pairs_of(ranks)) {  // one after the other, so that they share nothing
    smp::barrier();
    const int own = smp::rank();
    double small_s = 0, large_s = 0;
    if (own == first || own == second) {
      const int other = own == first ? second : first;
      small_s = one_way_s(own, other, kSmall, kSmallRounds);
      large_s = one_way_s(own, other, kLarge, kLargeRounds);
    }
    const auto seconds = smp::allgather(std::pair(small_s, large_s), smp::CommGroup::WORLD)[static_cast<size_t>(first)];
    if (is_first)
      std::printf("ranks %d and %d: %.0f us for %zu bytes, %.2f GiB/s\n", first, second, 1e6 * seconds.first, kSmall,
                  static_cast<double>(kLarge) / seconds.second / kGiB);
  }
  const std::vector<std::string> warnings = warnings_of(ranks);
  if (is_first) {
    for (const std::string& warning : warnings) std::printf("warning: %s\n", warning.c_str());
    std::puts(warnings.empty() ? "nothing is wrong" : "see the warnings");
  }
  smp::shutdown();
  return warnings.empty() ? 0 : 1;
}
