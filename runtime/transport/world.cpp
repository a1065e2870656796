// Owns the choice by launcher.
#include "runtime/transport/world.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/transport/loopback.h"
#include "runtime/transport/mpi_transport.h"
#include "runtime/transport/socket_transport.h"
#include "runtime/watch/deadline.h"

namespace smp::runtime {
namespace {

constexpr std::chrono::milliseconds kLeastStart = std::chrono::seconds(60);  // of MPI, on a busy machine

std::shared_ptr<Transport> join_mpi(const Launch& launch, std::chrono::milliseconds timeout) {
  const auto limit = std::max(timeout, kLeastStart);
  const Deadline deadline(limit, c10::str("[rank ", launch.rank, "] expected MPI to start within ", limit.count() / 1000,
                                          " s, got no answer of it: another rank is stopped or was not started, or its ",
                                          "host cannot be reached. timeout_s decides how long ranks wait."));
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
