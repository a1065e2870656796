// Memory of a device over a transport that moves the host's alone: MPI without CUDA, sockets.
#pragma once

#include <memory>

#include "runtime/transport/transport.h"

namespace smp::runtime {

enum class Staged {
  kDeviceMemory,  // what is not the host's
  kAllMemory,     // for tests where there is no device
};

/// Sends by way of pinned memory of the host, and receives into such. The host waits for the device only where it waits for
/// a message anyway: what the device has not yet made is sent by progress(), test() and wait(), in the order of isend.
std::shared_ptr<Transport> make_staged(std::shared_ptr<Transport> inner, Staged staged = Staged::kDeviceMemory);

}  // namespace smp::runtime
