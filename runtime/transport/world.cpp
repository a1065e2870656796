// Owns the choice by launcher.
#include "runtime/transport/world.h"

#include <c10/util/Exception.h>

#include "runtime/transport/loopback.h"
#include "runtime/transport/mpi_transport.h"
#include "runtime/transport/socket_transport.h"

namespace smp::runtime {
namespace {

std::shared_ptr<Transport> join_mpi(const Launch& launch, std::chrono::milliseconds timeout) {
  auto world = mpi::create(timeout);
  // Everybody hears of it, so that nobody waits for a rank that has thrown.
  const std::string own = describe_mismatch(launch, world->rank(), world->size());
  for (const std::string& complaint : world->all_gather(own)) TORCH_CHECK_VALUE(complaint.empty(), complaint);
  return world;
}

}  // namespace

std::shared_ptr<Transport> join_world(const Launch& launch, std::chrono::milliseconds timeout) {
  switch (launch.kind) {
    case Launch::Kind::kSingleProcess:
      return LoopbackWorld(1, timeout).transport(0);
    case Launch::Kind::kMpirun:
      return join_mpi(launch, timeout);
    case Launch::Kind::kTorchrun:
      return sockets::create(launch, timeout);
  }
  TORCH_INTERNAL_ASSERT(false, "a launcher without a transport");
}

void leave_world(const Launch& launch, Transport& world) {
  if (launch.kind == Launch::Kind::kMpirun) mpi::shutdown(world);
  if (launch.kind == Launch::Kind::kTorchrun) sockets::shutdown(world);
}

}  // namespace smp::runtime
