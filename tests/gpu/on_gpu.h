// What programs of this folder have in common: they compute on a GPU, or end with an error.
#pragma once

#include <ATen/ops/ones.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

#include "runtime/device/device.h"
#include "runtime/libtorch/deterministic.h"

namespace smp::tests {

using DeterministicAlgorithms = runtime::DeterministicScope;

/// Gives the GPU some milliseconds of work. The one of tests/fake_gpu finds what is out of order however fast it is.
inline void something_slow() {
  const int64_t width = runtime::this_ranks_device().model() == "none" ? 2 : 2048;
  at::Tensor x = at::ones({width, width}, at::kCUDA);
  for (int i = 0; i < 20; ++i) x = x.mm(x).div_(width);
}

/// This thread's work on the GPU goes to a stream of its own while it lives; else as before.
class OwnStream {
 public:
  explicit OwnStream(bool is_on_gpu = true) {
    if (is_on_gpu) before_ = guard().exchangeStream(guard().getStreamFromGlobalPool(runtime::this_ranks_device().current()));
  }
  ~OwnStream() {
    if (before_) guard().exchangeStream(*before_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  static const c10::impl::DeviceGuardImplInterface& guard() { return *c10::impl::getDeviceGuardImpl(c10::kCUDA); }
  std::optional<c10::Stream> before_;
};

}  // namespace smp::tests
