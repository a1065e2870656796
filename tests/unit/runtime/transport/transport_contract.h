// Owns what the tests of the transport contract share: the worlds they run in, and short words for messages.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

using Body = std::function<void(Transport&)>;

/// The loopback and sockets with up to 5 ranks when the program was started alone, MPI when by mpirun.
std::vector<int> contract_worlds();
std::string contract_world_name(const testing::TestParamInfo<int>& world);

/// A suite of tests that every transport passes. Derive one class per file, and SMP_FOR_EVERY_TRANSPORT(it).
class TransportContract : public testing::TestWithParam<int> {
 protected:
  /// Every rank runs `body`, in a world of its own that no earlier test has touched, whose waits end after `timeout`.
  void run(const Body& body, std::chrono::milliseconds timeout = std::chrono::seconds(60)) const;
};

// A macro because GoogleTest's own pastes the name of the suite.
#define SMP_FOR_EVERY_TRANSPORT(suite) \
  INSTANTIATE_TEST_SUITE_P(Transports, suite, testing::ValuesIn(contract_worlds()), contract_world_name)

int next(const Transport& transport);
int previous(const Transport& transport);

template <class T>
Request send(Transport& transport, int dest, int tag, const T& value) {
  return transport.isend(dest, tag, &value, sizeof(value));
}
template <class T>
T receive(Transport& transport, int source, int tag) {
  T value{};
  EXPECT_EQ(transport.irecv(source, tag, &value, sizeof(value)).wait("receive"), static_cast<int64_t>(sizeof(value)));
  return value;
}

}  // namespace smp::runtime
