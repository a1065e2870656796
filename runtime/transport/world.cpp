// Owns the choice by launcher.
#include "runtime/transport/world.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/launch/addresses.h"
#include "runtime/transport/loopback.h"
#include "runtime/transport/mpi_transport.h"
#include "runtime/transport/socket_transport.h"
#include "runtime/watch/alarm.h"

namespace smp::runtime {
namespace {

constexpr std::chrono::milliseconds kLeastStart = std::chrono::seconds(60);  // of MPI, on a busy machine
constexpr std::chrono::milliseconds kFirstWord = std::chrono::seconds(30);   // of who waits for others to start

std::chrono::milliseconds start_limit(const Launch& launch, std::chrono::milliseconds timeout) {
  return launch.has_mpi() ? std::max(timeout, kLeastStart) : timeout;
}

std::shared_ptr<Transport> join_mpi(const Launch& launch, std::chrono::milliseconds timeout) {
  const auto limit = start_limit(launch, timeout);
  const Alarm end(limit, ending_with(c10::str("[rank ", launch.rank, "] expected MPI to start within ", limit.count() / 1000,
                                              " s, got no answer of it: another rank is stopped or was not started, or its ",
                                              "host cannot be reached. timeout_s decides how long ranks wait.")));
  auto world = mpi::create(timeout);
  // Everybody hears of it, so that nobody waits for a rank that has thrown.
  const std::string own = describe_mismatch(launch, world->rank(), world->size());
  for (const std::string& complaint : world->all_gather(own)) TORCH_CHECK_VALUE(complaint.empty(), complaint);
  return world;
}

}  // namespace

std::string text_of_waiting(const Launch& launch, std::chrono::milliseconds so_far, std::chrono::milliseconds limit) {
  std::string networks;
  for (const std::string& address : own_addresses()) networks += (networks.empty() ? "" : ", ") + address;
  std::string text = c10::str("[rank ", launch.rank, "] has waited for ", so_far.count() / 1000, " s for ", launch.size - 1,
                              " other ranks to come");
  if (launch.kind == Launch::Kind::kTorchrun)
    text += c10::str(" to ", launch.store.host, ":", launch.store.port, " (MASTER_ADDR, MASTER_PORT)");
  return c10::str(text, ", and waits until ", limit.count() / 1000, " s. This host has ",
                  networks.empty() ? "no network but loopback" : networks,
                  ". Are all started, and can their hosts reach each other on all ports?");
}

std::shared_ptr<Transport> join_world(const Launch& launch, std::chrono::milliseconds timeout) {
  if (launch.kind == Launch::Kind::kSingleProcess) return LoopbackWorld(1, timeout).transport(0);
  const Alarm word(kFirstWord, saying(text_of_waiting(launch, kFirstWord, start_limit(launch, timeout))));
  switch (launch.kind) {
    case Launch::Kind::kSingleProcess:
      break;
    case Launch::Kind::kMpirun:
    case Launch::Kind::kSrun:
      return join_mpi(launch, timeout);
    case Launch::Kind::kTorchrun:
      return sockets::create(launch, timeout);
  }
  TORCH_INTERNAL_ASSERT(false, "a launcher without a transport");
}

void leave_world(const Launch& launch, Transport& world) {
  if (launch.has_mpi()) mpi::shutdown(world);
  if (launch.kind == Launch::Kind::kTorchrun) sockets::shutdown(world);
}

}  // namespace smp::runtime
