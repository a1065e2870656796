// Owns which transport a launcher's processes use.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "runtime/launch/launch.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// The world of this process's launcher: MPI under mpirun, sockets under torchrun, a loopback alone. Collective over all its
/// processes. timeout: of every wait. Throws CommError when the others cannot be reached, c10::ValueError, on all ranks,
/// when MPI has found other ranks than `launch` says.
std::shared_ptr<Transport> join_world(const Launch& launch, std::chrono::milliseconds timeout = kDefaultTimeout);

/// What a rank says while it waits there for longer than usual.
std::string text_of_waiting(const Launch& launch, std::chrono::milliseconds so_far, std::chrono::milliseconds limit);

/// Ends it: collective, waits for all ranks. After a failure it does nothing, because the others will not come. Afterwards
/// `world` may not be used.
void leave_world(const Launch& launch, Transport& world);

}  // namespace smp::runtime
