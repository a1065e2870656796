// Replaces the global operators, so it is linked into programs that test decoders only.
#include "tests/support/counted_memory.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>
#include <new>

namespace smp::support {
namespace {

constexpr size_t kMostAtOnce = size_t{1} << 26;

thread_local bool is_counting = false;
thread_local int64_t counted = 0;

void count(size_t num_bytes) {
  if (!is_counting) return;
  counted += static_cast<int64_t>(num_bytes);
  if (num_bytes > kMostAtOnce) throw std::bad_alloc();
}

void* counted_new(size_t num_bytes, size_t alignment) {
  count(num_bytes);
  const size_t rounded = (num_bytes + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

struct CountingAllocator : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    count(num_bytes);
    return c10::GetDefaultCPUAllocator()->allocate(num_bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetDefaultCPUAllocator()->raw_deleter(); }
  void copy_data(void* dest, const void* source, size_t num_bytes) const override {
    c10::GetDefaultCPUAllocator()->copy_data(dest, source, num_bytes);
  }
};

}  // namespace

int64_t bytes_asked_for(const std::function<void()>& call) {
  static CountingAllocator allocator;
  static const bool is_set = (c10::SetCPUAllocator(&allocator, /*priority=*/255), true);
  static_cast<void>(is_set);
  counted = 0;
  is_counting = true;
  try {
    call();
  } catch (...) {
    is_counting = false;
    throw;
  }
  is_counting = false;
  return counted;
}

}  // namespace smp::support

void* operator new(size_t num_bytes) { return smp::support::counted_new(num_bytes, alignof(std::max_align_t)); }
void* operator new(size_t num_bytes, std::align_val_t alignment) {
  return smp::support::counted_new(num_bytes, static_cast<size_t>(alignment));
}
// Elsewhere the standard library's calls the first of these; AddressSanitizer has one of its own.
void* operator new(size_t num_bytes, const std::nothrow_t&) noexcept try {
  return operator new(num_bytes);
} catch (const std::bad_alloc&) {
  return nullptr;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { std::free(memory); }
