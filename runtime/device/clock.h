// When a device comes to points of what it is given to do.
#pragma once

#include <vector>

namespace smp::runtime {

/// Of one thread.
class DeviceClock {
 public:
  virtual ~DeviceClock() = default;
  /// Behind what this thread has given the device so far. Returns at once.
  virtual void mark() = 0;
  /// Microseconds from each mark since the last call to the next one, when the device has come to all of them.
  virtual std::vector<double> take_us() = 0;
};

}  // namespace smp::runtime
