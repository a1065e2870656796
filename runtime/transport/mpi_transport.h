// Owns the door to the MPI transport. CMake chooses what is behind it: mpi_transport.cpp, or
// mpi_transport_absent.cpp where no MPI was found.
#pragma once

#include <chrono>
#include <memory>

#include "runtime/transport/transport.h"

namespace smp::runtime::mpi {

/// The world of this process's launcher. Collective over all its processes. Initialises MPI when nobody has; then, and only
/// then, shutdown() finalises it. timeout: of every wait. Several transports may be made, one after the other. Throws
/// CommError when MPI fails, c10::NotImplementedError in a build without MPI.
std::shared_ptr<Transport> create(std::chrono::milliseconds timeout = kDefaultTimeout);

/// Ends `world`, which create() made: collective, waits for all ranks, then finalises MPI if create() initialised it. After
/// a failure it does nothing, because the others will not come. Afterwards no transport may be used. A rank that ends
/// without it counts as lost with those that still wait for it.
void shutdown(Transport& world);

}  // namespace smp::runtime::mpi
