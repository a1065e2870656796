// Work that a thread has given to its device, recorded once and given again as a whole.
#pragma once

#include <cstdint>
#include <functional>

namespace smp::runtime {

/// A CUDA graph. Its tensors stay where they were when it was recorded: those that come in are written to before each
/// replay, those that come out are read before the next one.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  /// Records what `work` gives to the device from this thread; the device does none of it yet. Throws what `work` throws,
  /// and c10::Error for work that waits for the device; then nothing is recorded.
  virtual void record(const std::function<void()>& work) = 0;
  /// Within `work`: what follows draws as the `ordinal`-th random operator of the stream that replay() names. In ascending
  /// order.
  virtual void seed(uint64_t ordinal) = 0;
  /// Gives all of it to the device, in order with what this thread has given to it before. Returns at once.
  virtual void replay(uint64_t random_stream) = 0;
};

}  // namespace smp::runtime
