// Owns the MPI transport of a build without MPI: it cannot be constructed.
#include <c10/util/Exception.h>

#include "runtime/transport/mpi_transport.h"

namespace smp::runtime::mpi {

std::shared_ptr<Transport> create(std::chrono::milliseconds) {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "mpi transport: expected a build with MPI, this one has none. Install libopenmpi-dev and ",
                              "openmpi-bin and build again, or start a single process.");
}

void shutdown(Transport&) { TORCH_INTERNAL_ASSERT(false, "no MPI transport can exist"); }

}  // namespace smp::runtime::mpi
