// Operators on tensors of the GPU that is none: the CPU's kernels, on the same memory.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/fake_gpu/order.h"

namespace smp::fake_gpu {

/// What one operator gives to the device.
struct Launch {
  std::string what;
  std::vector<Range> reads, writes;
  std::function<void()> run;
};

/// While it lives, this thread's operators are written down; what they write to is at its end as it was before.
class Recording {
 public:
  Recording();
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  /// Null: none goes on.
  static Recording* of_thread();
  /// Of these, what is there now.
  void keep(const std::vector<Range>& ranges);

  std::vector<Launch> launches;
  std::set<BlockPtr> made;  // memory, whose values come with the first replay

 private:
  std::map<BlockPtr, std::string> kept_;
};

}  // namespace smp::fake_gpu
