// Owns the worlds of the transport contract.
#include "tests/unit/runtime/transport/transport_contract.h"

#include <cstdlib>

#include "runtime/transport/mpi_transport.h"
#include "tests/support/loopback_world.h"

namespace smp::runtime {
namespace {

constexpr int kUnderMpirun = 0;

bool is_under_mpirun() { return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr; }

// mpirun calls a program that ends without finalising MPI a failure.
class MpiEnd : public testing::Environment {
 public:
  void TearDown() override { mpi::shutdown(*mpi::create()); }
};

[[maybe_unused]] const auto* const mpi_end = is_under_mpirun() ? testing::AddGlobalTestEnvironment(new MpiEnd) : nullptr;

}  // namespace

std::vector<int> contract_worlds() {
  if (is_under_mpirun()) return {kUnderMpirun};
  return {1, 2, 3, 4, 5};
}

std::string contract_world_name(const testing::TestParamInfo<int>& world) {
  return world.param == kUnderMpirun ? "Mpi" : "Loopback" + std::to_string(world.param);
}

void TransportContract::run(const Body& body, std::chrono::milliseconds timeout) const {
  if (GetParam() == kUnderMpirun)
    body(*mpi::create(timeout));
  else
    tests::run_ranks(GetParam(), body, timeout);
}

int next(const Transport& transport) { return (transport.rank() + 1) % transport.size(); }
int previous(const Transport& transport) { return (transport.rank() + transport.size() - 1) % transport.size(); }

}  // namespace smp::runtime
