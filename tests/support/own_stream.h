// Ranks that are threads of one process give a GPU their work in no order between each other, as processes do.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

#include "runtime/device/device.h"

namespace smp::tests {

/// This thread's work on its device goes to a stream of its own while it lives; on the host as before.
class OwnStream {
 public:
  OwnStream() {
    const runtime::Device& device = runtime::this_ranks_device();
    if (device.type == runtime::host().type) return;
    guard_ = c10::impl::getDeviceGuardImpl(device.type);
    before_ = guard_->exchangeStream(guard_->getStreamFromGlobalPool(device.current()));
  }
  ~OwnStream() {
    if (before_) guard_->exchangeStream(*before_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  const c10::impl::DeviceGuardImplInterface* guard_ = nullptr;
  std::optional<c10::Stream> before_;
};

}  // namespace smp::tests
