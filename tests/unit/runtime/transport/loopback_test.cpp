// Owns the proof that the loopback is strict, and that run_ranks never hangs.
#include "runtime/transport/loopback.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>

#include "examples/common/tensor_memory.h"
#include "runtime/transport/error.h"
#include "tests/support/loopback_world.h"

namespace smp::runtime {
namespace {

using tests::run_ranks;

std::string error_of(int num_ranks, const std::function<void(Transport&)>& body) {
  try {
    run_ranks(num_ranks, body);
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

TEST(Loopback, FailsAtOnceWhenAllRanksWaitAndSaysForWhat) {
  const std::string text = error_of(3, [](Transport& transport) {
    int value = 0;
    if (transport.rank() == 0) transport.irecv(1, 7, &value, 4).wait("2F0");
    if (transport.rank() == 1) transport.isend(2, 8, &value, 4).wait("1B3");
    if (transport.rank() == 2) transport.barrier();
  });
  expect_contains(text, "deadlock");
  expect_contains(text, "rank 0 waits for receive of at most 4 bytes with tag 7 from rank 1, action 2F0");
  expect_contains(text, "rank 1 waits for send of 4 bytes with tag 8 to rank 2, action 1B3");
  expect_contains(text, "rank 2 waits for barrier");
}

TEST(Loopback, FailsWhoWaitsForARankThatHasLeft) {
  const std::string text = error_of(2, [](Transport& transport) {
    int value = 0;
    if (transport.rank() == 0) transport.irecv(1, 0, &value, 4).wait();
  });
  expect_contains(text, "rank 0 waits for receive of at most 4 bytes with tag 0 from rank 1");
  expect_contains(text, "rank 1 has left");
}

TEST(Loopback, RefusesProgramsThatRelyOnBufferedSends) {
  const std::string text = error_of(2, [](Transport& transport) {
    int value = 0;
    transport.isend(1 - transport.rank(), 0, &value, 4).wait();
    transport.irecv(1 - transport.rank(), 0, &value, 4).wait();
  });
  expect_contains(text, "deadlock");
}

TEST(Loopback, NamesMessagesThatNobodyTook) {
  static const int value = 0;
  static int got = 0;
  const std::string text = error_of(2, [](Transport& transport) {
    if (transport.rank() == 0) Request sent = transport.isend(1, 3, &value, 4);
    if (transport.rank() == 1) Request received = transport.irecv(0, 4, &got, 4);
  });
  expect_contains(text, "rank 0: send of 4 bytes with tag 3 to rank 1 was never received");
  expect_contains(text, "rank 1: receive of at most 4 bytes with tag 4 from rank 0 was never sent");
}

TEST(Loopback, RefusesCollectivesThatDiffer) {
  const std::string kinds = error_of(2, [](Transport& transport) {
    int value = 0;
    if (transport.rank() == 0) transport.barrier();
    if (transport.rank() == 1) transport.broadcast(&value, 4, 0);
  });
  expect_contains(kinds, "rank 0 calls barrier, rank 1 calls broadcast of 4 bytes from rank 0");
  const std::string sizes = error_of(2, [](Transport& transport) {
    std::vector<char> data(8);
    transport.broadcast(data.data(), 7 + transport.rank(), 0);
  });
  expect_contains(sizes, "broadcast of 7 bytes from rank 0, rank 1 calls broadcast of 8 bytes from rank 0");
}

TEST(RunningSum, ThatFailsLeavesItsBuffersToTheMessages) {
  const auto run = [](Transport& transport) {
    if (transport.rank() == 1) {  // goes when the other has begun
      std::vector<float> part(1000);
      transport.irecv(0, kSumTag, part.data(), 4000).wait();
      throw std::runtime_error("gone");
    }
    std::vector<float> data(2000);
    const examples::TensorMemory memory;
    EXPECT_THROW(transport.all_reduce_sum(data.data(), 2000, c10::ScalarType::Float), CommError);
    EXPECT_EQ(memory.current_bytes(), 2 * 4000) << "room for half of the elements of each rank";
  };
  EXPECT_THROW(run_ranks(2, run), std::runtime_error);
}

TEST(Loopback, KeepsTheSenderWaitingUntilTheMessageIsTaken) {
  run_ranks(2, [](Transport& transport) {
    int value = 1;
    if (transport.rank() == 0) {
      Request sent = transport.isend(1, 0, &value, 4);
      transport.barrier();
      EXPECT_FALSE(sent.test());
      value = 2;  // what a sender may not do shows, because nothing is buffered
      transport.barrier();
      sent.wait();
    } else {
      int got = 0;
      transport.barrier();
      transport.barrier();
      transport.irecv(0, 0, &got, 4).wait();
      EXPECT_EQ(got, 2);
    }
  });
}

TEST(Loopback, RethrowsTheFirstExceptionWithItsType) {
  try {
    run_ranks(4, [](Transport& transport) {
      if (transport.rank() == 2) throw std::out_of_range("the root cause");
      transport.barrier();
    });
    FAIL() << "expected the root cause";
  } catch (const std::out_of_range& error) {
    EXPECT_STREQ(error.what(), "the root cause");
  }
}

TEST(Loopback, RefusesAWorldWithoutRanks) {
  EXPECT_THROW(LoopbackWorld(0), c10::ValueError);
  EXPECT_THROW(LoopbackWorld(2).transport(2), c10::IndexError);
}

}  // namespace
}  // namespace smp::runtime
