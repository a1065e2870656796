// Reads /proc/self, described in proc(5), and counts tensors.
#include "examples/transformer_lm/memory.h"

#include <fstream>
#include <string>

namespace transformer_lm {
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

// The peak starts again from what is resident now. Without effect where the kernel forbids it.
void forget_resident_peak() {
  std::ofstream("/proc/self/clear_refs") << "5\n";  // 5: reset the peak
}

}  // namespace

StepMemory::StepMemory()
    : tensors_(std::make_unique<examples::TensorMemory>()),
      idle_resident_bytes_(status_bytes("VmRSS:")) {}

void StepMemory::after_step(int64_t step) {
  constexpr int64_t kLastCounted = 5;
  if (step == 1) {
    tensors_->forget_peak();
    forget_resident_peak();
  }
  if (tensors_) tensor_bytes_ = tensors_->peak_bytes();
  if (step >= kLastCounted) tensors_.reset();
}

void StepMemory::finish() {
  tensors_.reset();
  resident_bytes_ = status_bytes("VmHWM:") - idle_resident_bytes_;
}

}  // namespace transformer_lm
