// The listener to LibTorch's reports of memory.
#include "examples/common/tensor_memory.h"

#include <c10/core/Allocator.h>

#include <atomic>

namespace examples {

// Reports arrive on this thread and on those that run its backward.
struct TensorMemory::Counter : c10::MemoryReportingInfoBase {
  void reportMemoryUsage(void*, int64_t alloc_size, size_t, size_t, c10::Device device) override {
    if (!device.is_cpu()) return;
    const int64_t now = current += (alloc_size + (alloc_size > 0 ? unit - 1 : 1 - unit)) / unit * unit;  // freed: below zero
    int64_t seen = peak;
    while (seen < now && !peak.compare_exchange_weak(seen, now)) {
    }
  }
  bool memoryProfilingEnabled() const override { return true; }
  explicit Counter(int64_t the_unit) : unit(the_unit) {}

  const int64_t unit;
  std::atomic<int64_t> current{0};
  std::atomic<int64_t> peak{0};
};

TensorMemory::TensorMemory(int64_t unit)
    : counter_(std::make_shared<Counter>(unit)), guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

int64_t TensorMemory::current_bytes() const { return counter_->current; }

int64_t TensorMemory::peak_bytes() const { return counter_->peak; }

void TensorMemory::forget_peak() { counter_->peak = counter_->current.load(); }

}  // namespace examples
