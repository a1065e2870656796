// Bytes of tensors that this rank holds, counted where LibTorch allocates them.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <cstdint>
#include <memory>

namespace examples {

/// Counts what the CPU allocator hands out to this thread while it lives: tensors, and the message
/// buffers of smp. Exact and repeatable, unlike resident memory, in which the code of libraries and
/// the heap's own gaps count too. Costs about 0.2 us per allocation, so measure times without it.
///
///   examples::TensorMemory memory;   // before the first tensor that is to be counted
///   ...
///   memory.peak_bytes();
///
/// Uses the place of LibTorch's memory profiler: one of them at a time. Destroy it on the thread that made it.
class TensorMemory {
 public:
  /// Each allocation counts as a multiple of `unit` bytes, as other allocators take them.
  explicit TensorMemory(int64_t unit = 1);

  /// Bytes that were allocated since the construction and are not freed.
  int64_t current_bytes() const;
  /// Most bytes at once since the construction or forget_peak().
  int64_t peak_bytes() const;
  /// The peak starts again from what is there now.
  void forget_peak();

 private:
  struct Counter;
  std::shared_ptr<Counter> counter_;
  c10::DebugInfoGuard guard_;
};

}  // namespace examples
