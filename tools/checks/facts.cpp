// Asks the kernel.
#include "tools/checks/facts.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <climits>
#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "runtime/launch/addresses.h"

namespace smp::tools {
namespace {

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kLeastShared = 64 * kMiB;  // of each rank: a bucket of gradients and the segments of MPI
constexpr int64_t kLeastFiles = 1024;
constexpr double kLargestClockDifference = 2;

int64_t available_memory() {
  std::ifstream lines("/proc/meminfo");
  int64_t available = 0;
  for (std::string key; lines >> key; lines.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    if (key == "MemAvailable:" && lines >> available) available *= 1024;
  }
  int64_t most = 0, used = 0;  // of the container
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> most && std::ifstream("/sys/fs/cgroup/memory.current") >> used)
    available = std::min(available, most - used);
  return available;
}

template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace

Facts facts_of_this_host() {
  Facts facts;
  std::array<char, HOST_NAME_MAX + 1> name{};
  gethostname(name.data(), name.size() - 1);
  facts.host = name.data();
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof cores, &cores) == 0) facts.num_cores = CPU_COUNT(&cores);
  double quota_us = 0, period_us = 0;  // of a container; the first is "max" without one
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> quota_us >> period_us && period_us > 0)
    facts.num_cores = std::min(facts.num_cores, std::max<int64_t>(1, std::llround(quota_us / period_us)));
  facts.memory_bytes = available_memory();
  struct statvfs shared{};
  if (statvfs("/dev/shm", &shared) == 0) facts.shared_bytes = static_cast<int64_t>(shared.f_bavail * shared.f_frsize);
  rlimit files{};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0)
    facts.num_files = static_cast<int64_t>(std::min<rlim_t>(files.rlim_cur, INT_MAX));
  facts.clock_s = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  facts.addresses = runtime::own_addresses();
  return facts;
}

std::vector<std::string> warnings_of(const std::vector<Facts>& ranks) {
  std::map<std::string, std::pair<Facts, int64_t>> hosts;  // and how many ranks are there
  for (const Facts& facts : ranks) {
    auto& [first, num_ranks] = hosts[facts.host];
    if (num_ranks++ == 0) first = facts;
  }
  std::vector<std::string> warnings;
  for (const auto& [name, there] : hosts) {
    const auto& [facts, num_ranks] = there;
    if (num_ranks > facts.num_cores)
      warnings.push_back(text("host ", name, ": ", num_ranks, " ranks share ", facts.num_cores,
                              " cores, and wait for each other. Start as many as there are cores."));
    if (num_ranks > 1 && facts.shared_bytes < num_ranks * kLeastShared)
      warnings.push_back(text("host ", name, ": /dev/shm has ", facts.shared_bytes / kMiB, " MiB for ", num_ranks,
                              " ranks, which want ", kLeastShared / kMiB, " each. In Docker: --shm-size."));
    if (facts.num_files < kLeastFiles)
      warnings.push_back(text("host ", name, ": ", facts.num_files, " files may be open at once, ", kLeastFiles,
                              " are usual. Raise it by ulimit -n."));
    if (hosts.size() > 1 && facts.addresses.empty())
      warnings.push_back(text("host ", name, ": no network but loopback is up, so other hosts cannot reach it."));
    const double difference = facts.clock_s - ranks.front().clock_s;
    if (std::abs(difference) > kLargestClockDifference)
      warnings.push_back(text("host ", name, ": its clock differs by ", difference, " s from that of ", ranks.front().host,
                              ", so times in logs do not compare. Run a time service."));
  }
  return warnings;
}

}  // namespace smp::tools
