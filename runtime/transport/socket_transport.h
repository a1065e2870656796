// Owns the transport of ranks that are connected by sockets: for launchers that know nothing of MPI, as torchrun.
#pragma once

#include <chrono>
#include <memory>

#include "runtime/launch/launch.h"
#include "runtime/transport/socket_rendezvous.h"
#include "runtime/transport/transport.h"

namespace smp::runtime::sockets {

/// The world that torchrun started, or who sets its variables. Collective over all its processes, which meet over the store
/// of torch.distributed at MASTER_ADDR:MASTER_PORT; torchrun keeps it, otherwise rank 0 does, and a later
/// init_process_group of the script shares it. timeout: of the meeting and of every wait. Several transports may be made,
/// one after the other. Throws CommError.
std::shared_ptr<Transport> create(const Launch& launch, std::chrono::milliseconds timeout = kDefaultTimeout);

/// The same over a store that is there, for ranks that may be threads of one process.
std::shared_ptr<Transport> create(c10d::Store& store, const Newcomer& self,
                                  std::chrono::milliseconds timeout = kDefaultTimeout);

/// Ends `world`, which create() made: collective, waits for all ranks. After a failure it does nothing, because the others
/// will not come. A rank that ends without it counts as lost with those that still wait for it.
void shutdown(Transport& world);

}  // namespace smp::runtime::sockets
