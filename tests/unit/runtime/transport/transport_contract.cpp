// Owns the worlds of the transport contract.
#include "tests/unit/runtime/transport/transport_contract.h"

#include <cstdlib>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "runtime/transport/linked_transport.h"
#include "runtime/transport/mpi_transport.h"
#include "runtime/transport/socket_transport.h"
#include "runtime/transport/staged_transport.h"
#include "tests/support/loopback_world.h"
#include "tests/support/thread_links.h"

namespace smp::runtime {
namespace {

// Other worlds are numbers of ranks, below 0 of ranks that are connected by sockets, and that many more of such ranks whose
// messages are staged, or go over links.
constexpr int kUnderMpirun = 0, kStaged = 100, kLinked = 200;

bool is_under_mpirun() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

// mpirun calls a program that ends without finalising MPI a failure.
class MpiEnd : public testing::Environment {
 public:
  void TearDown() override { mpi::shutdown(*mpi::create()); }
};

[[maybe_unused]] const auto* const mpi_end = is_under_mpirun() ? testing::AddGlobalTestEnvironment(new MpiEnd) : nullptr;

// Ranks are threads that meet over a store of this process. With three, every second time over TCP.
void run_over_sockets(int num_ranks, const Body& body, std::chrono::milliseconds timeout) {
  static int num_worlds = 0;
  const std::string host = num_ranks == 3 && ++num_worlds % 2 == 0 ? "127.0.0.1" : "";
  c10d::HashStore store;
  std::vector<std::exception_ptr> errors(static_cast<size_t>(num_ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto world = sockets::create(store, {rank, num_ranks, num_ranks, host}, timeout);
      try {
        body(*world);
        sockets::shutdown(*world);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
        world->abort("a test has failed");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

}  // namespace

std::vector<int> contract_worlds() {
  if (is_under_mpirun()) return {kUnderMpirun};
  return {1, 2, 3, 4, 5, -1, -2, -3, -5, kStaged + 2, kStaged + 3, kLinked + 2, kLinked + 3};
}

std::string contract_world_name(const testing::TestParamInfo<int>& world) {
  if (world.param == kUnderMpirun) return "Mpi";
  if (world.param > kLinked) return "Linked" + std::to_string(world.param - kLinked);
  if (world.param > kStaged) return "Staged" + std::to_string(world.param - kStaged);
  return world.param > 0 ? "Loopback" + std::to_string(world.param) : "Sockets" + std::to_string(-world.param);
}

void TransportContract::run(const Body& body, std::chrono::milliseconds timeout) const {
  if (GetParam() == kUnderMpirun)
    body(*mpi::create(timeout));
  else if (GetParam() > kStaged)
    run_over_sockets(
        GetParam() % kStaged,
        [&](Transport& transport) {
          static const support::ThreadLinks links;
          const std::shared_ptr<Transport> borrowed(std::shared_ptr<void>(), &transport);
          body(GetParam() > kLinked ? *make_linked(borrowed, links, Linked::kAllMemory)
                                    : *make_staged(borrowed, Staged::kAllMemory));
        },
        timeout);
  else if (GetParam() < 0)
    run_over_sockets(-GetParam(), body, timeout);
  else
    tests::run_ranks(GetParam(), body, timeout);
}

int next(const Transport& transport) { return (transport.rank() + 1) % transport.size(); }
int previous(const Transport& transport) { return (transport.rank() + transport.size() - 1) % transport.size(); }

}  // namespace smp::runtime
