// Memory of a device by links between devices; all else by a transport that moves the host's.
#pragma once

#include <memory>

#include "runtime/device/links.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

enum class Linked {
  kDeviceMemory,  // what is not the host's
  kAllMemory,     // for tests where there is no device
};

/// Collective over the ranks of `world`. A message of a device's memory is a header in `world`, which finds its receive;
/// then the receiver starts its end of the link between the two and tells the sender to start the other. So a link is given
/// transfers in one order on both ends, and none for which its rank has not asked. A receive is complete when both devices
/// have been given it, and what this rank's device is given from then on comes behind it; a send, when the device has done
/// it. Both ranks of a message give memory of the host, or both of their device.
std::shared_ptr<Transport> make_linked(std::shared_ptr<Transport> world, const DeviceLinks& links,
                                       Linked linked = Linked::kDeviceMemory);

}  // namespace smp::runtime
