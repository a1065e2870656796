// Names of calls between ranks: the same ones pass in any number, others end the job on both sides.
#include "runtime/exchange/calls.h"

#include <gtest/gtest.h>

#include "runtime/transport/error.h"
#include "tests/support/loopback_world.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using support::contains;
using support::message_of;
using tests::run_ranks;

// Borrowed: the ranks of a test have their transports anyway.
std::shared_ptr<Transport> shared(Transport& world) { return {std::shared_ptr<void>(), &world}; }

// What this rank's part of a job says, which it need not have found itself.
std::string failure_of(const std::function<void()>& part) {
  try {
    part();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const CommError& error) {
    return error.what();
  }
  return "";
}

TEST(Calls, ThatAreTheSamePassInAnyNumber) {
  run_ranks(3, [](Transport& world) {
    Calls calls(shared(world));
    for (int call = 0; call < 20; ++call) {
      const std::string name = "call " + std::to_string(call);
      for (int rank = 0; rank < 3; ++rank) {
        if (rank != world.rank()) calls.tell(rank, name);
      }
      for (int rank = 0; rank < 3; ++rank) {
        if (rank != world.rank()) calls.hear(rank, name);
      }
    }
  });
}

// As a leader does: nothing that it tells waits for a rank that is not more than one call behind.
TEST(Calls, ThatNobodyHearsAreHeardWithTheNext) {
  run_ranks(2, [](Transport& world) {
    Calls calls(shared(world));
    const int other = 1 - world.rank();
    for (int call = 0; call < 20; ++call) {
      calls.tell(other, "step");
      if (world.rank() == 1) calls.hear(other, "step");
    }
    calls.tell(other, "barrier");
    calls.hear(other, "barrier");
  });
}

TEST(Calls, ThatDifferEndTheJobWithBothNamesOnBothSides) {
  std::string texts[2];
  const auto job = [&](Transport& world) {
    Calls calls(shared(world));
    const int own = world.rank(), other = 1 - own;
    calls.tell(other, "step");
    texts[own] = failure_of([&] {
      calls.tell(other, own == 0 ? "step" : "state_dict");
      // The leader of a step goes on without having heard the others; what it waits for then never comes.
      if (own == 1) calls.hear(other, "state_dict");
      world.barrier();
    });
  };
  run_ranks(2, job);
  for (const std::string& text : texts) {
    EXPECT_TRUE(contains(text, "state_dict on rank 1 and step on rank 0 (call 2 of the two together)")) << text;
  }
}

TEST(Calls, WithLongNamesAreComparedByWhatTravels) {
  run_ranks(2, [](Transport& world) {
    Calls calls(shared(world));
    const int other = 1 - world.rank();
    calls.tell(other, std::string(500, 'a') + std::to_string(world.rank()));
    calls.hear(other, "a long name");
  });
}

}  // namespace
}  // namespace smp::runtime
