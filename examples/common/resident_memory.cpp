// Reads /proc/self, described in proc(5).
#include "examples/common/resident_memory.h"

#include <fstream>
#include <string>

namespace examples {
namespace {

// The value of a "Name:   123 kB" line.
int64_t status_bytes(const std::string& name) {
  constexpr int64_t kBytesPerKb = 1024;
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == name && status >> kilobytes) return kilobytes * kBytesPerKb;
  }
  return 0;
}

}  // namespace

int64_t resident_bytes() { return status_bytes("VmRSS:"); }

int64_t peak_resident_bytes() { return status_bytes("VmHWM:"); }

void forget_resident_peak() {
  std::ofstream("/proc/self/clear_refs") << "5\n";  // 5: reset the peak
}

}  // namespace examples
