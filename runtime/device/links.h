// What moves bytes from a device to another one's: NCCL, for CUDA. Owns the contract.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "runtime/device/device.h"

namespace smp::runtime {

/// One way between two ranks. What both ends start comes in the same order on both.
class DeviceLink {
 public:
  /// Breaks off what is under way.
  virtual ~DeviceLink() = default;
  /// The next transfer, from or to `memory`, behind `ready`. Returns at once, whatever the other end does.
  virtual void start(const DeviceMemory& memory, const Event& ready) = 0;
  /// The end of the oldest transfer that was started and not yet told of, once the device has been given it. Never blocks.
  /// Throws std::exception where the link is broken.
  virtual std::optional<Event> next_given() = 0;
};

class DeviceLinks {
 public:
  enum class End { kSender, kReceiver };

  /// What both ends of a link are given, of one length.
  virtual std::string new_name() const = 0;
  /// One end of the link of that name. Returns at once.
  virtual std::unique_ptr<DeviceLink> connect(std::string_view name, End end) const = 0;

 protected:
  ~DeviceLinks() = default;
};

}  // namespace smp::runtime
