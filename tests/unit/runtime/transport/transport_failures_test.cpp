// Owns the contract of what is refused and how failures spread.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>

#include "runtime/transport/error.h"
#include "runtime/transport/running_sum.h"
#include "tests/unit/runtime/transport/transport_contract.h"

namespace smp::runtime {
namespace {

class TransportFailures : public TransportContract {};
SMP_FOR_EVERY_TRANSPORT(TransportFailures);

using std::chrono::milliseconds;

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}
TEST_P(TransportFailures, RefusesCallersMistakesBeforeAnythingIsSent) {
  run([](Transport& transport) {
    const int n = transport.size();
    int value = 0;
    const auto refused = [](const auto& call) { EXPECT_THROW(call(), c10::ValueError); };
    refused([&] { (void)transport.isend(n, 0, &value, 4); });
    refused([&] { (void)transport.isend(0, -1, &value, 4); });
    refused([&] { (void)transport.irecv(-1, 0, &value, 4); });
    refused([&] { (void)transport.irecv(0, kMaxTag + 1, &value, 4); });
    refused([&] { (void)transport.irecv(0, 0, &value, -4); });
    refused([&] { transport.broadcast(&value, 4, n); });
    refused([&] { transport.group({transport.rank(), transport.rank()}); });
    refused([&] { transport.group({transport.rank(), n}); });
    refused([&] { transport.group({}); });
    EXPECT_THROW(transport.all_reduce_sum(&value, 1, c10::ScalarType::Int), c10::TypeError);
    expect_contains(error_of([&] { (void)transport.isend(n, 0, &value, 4); }),
                    "isend: expected a rank of this group, 0 ... " + std::to_string(n - 1) + ", got " + std::to_string(n));
    transport.barrier();
  });
}

// What moves host memory must not read an address of another device.
TEST_P(TransportFailures, RefusesMemoryOfADeviceThatItDoesNotMove) {
  run([](Transport& transport) {
    int64_t value = 0;
    const DeviceMemory memory{&value, sizeof value, c10::DeviceType::CUDA};
    const auto refused = [](const std::string& operation, const auto& call) {
      EXPECT_THROW(call(), c10::ValueError);
      expect_contains(error_of(call), operation + ": expected memory of the host");
      expect_contains(error_of(call), "of type cuda");
    };
    refused("isend", [&] { (void)transport.isend(0, 0, memory); });
    refused("irecv", [&] { (void)transport.irecv(0, 0, memory); });
    refused("broadcast", [&] { transport.broadcast(memory, 0); });
    refused("all_reduce_sum", [&] { transport.all_reduce_sum(memory, c10::ScalarType::Long); });
    refused("all_reduce_sum", [&] { RunningSum(transport, 0, memory, nullptr, c10::ScalarType::Float); });
    transport.barrier();
  });
}

TEST_P(TransportFailures, ReportsATruncatedMessage) {
  run([](Transport& transport) {
    const int64_t values[2] = {1, 2};
    int64_t got = 0;
    Request sent = transport.isend(transport.rank(), 8, values, sizeof(values));
    Request received = transport.irecv(transport.rank(), 8, &got, sizeof(got));
    const std::string text = error_of([&] { received.wait("2F0"); });
    expect_contains(text, "receive of at most 8 bytes with tag 8");
    expect_contains(text, "peer rank " + std::to_string(transport.rank()));
    expect_contains(text, "action 2F0");
    expect_contains(text, "truncated: expected at most 8 bytes, got 16");
    transport.barrier();
    received = {};  // what it held serves one later message, not two
    int64_t later[2] = {};
    Request first = transport.irecv(transport.rank(), 1, &later[0], sizeof later[0]);
    Request second = transport.irecv(transport.rank(), 2, &later[1], sizeof later[1]);
    transport.isend(transport.rank(), 2, &values[1], sizeof values[1]).wait();
    EXPECT_EQ(second.wait(), 8);
    EXPECT_EQ(later[1], 2);
    EXPECT_FALSE(first.test());
    transport.isend(transport.rank(), 1, &values[0], sizeof values[0]).wait();
    EXPECT_EQ(first.wait(), 8);
    EXPECT_EQ(later[0], 1);
    transport.barrier();
  });
}

// Rank 0 fails as `fail` says; the others compute and drive their messages until they hear of it.
void fail_on_rank_0(Transport& transport, const Body& fail) {
  if (transport.rank() == 0) return fail(transport);
  EXPECT_THROW(for (;;) transport.progress(), CommError);
}

TEST_P(TransportFailures, NamesWhatTimedOut) {
  const auto body = [](Transport& transport) {
    if (transport.size() == 1) return;
    fail_on_rank_0(transport, [](Transport& mine) {
      int64_t value = 0;
      Request received = mine.irecv(1, 6, &value, sizeof(value));
      const std::string text = error_of([&] { received.wait("2F0"); });
      expect_contains(text, "receive of at most 8 bytes with tag 6, peer rank 1, action 2F0, after ");
      expect_contains(text, "timed out");
      EXPECT_THROW(mine.progress(), CommError);
      mine.abort("timed out");
    });
  };
  run(body, milliseconds(150));
}

TEST_P(TransportFailures, TimesOutInACollective) {
  const auto body = [](Transport& transport) {
    if (transport.size() == 1) return;
    fail_on_rank_0(transport, [](Transport& mine) {
      const std::string text = error_of([&] { mine.barrier(); });
      expect_contains(text, "barrier, after ");
      expect_contains(text, "timed out");
      mine.abort("timed out");
    });
  };
  run(body, milliseconds(150));
}

// Rank 0 gives one element less: it is sent more than it has room for, and the others less than they expect.
TEST_P(TransportFailures, FindsSumsOfDifferentLengths) {
  run([](Transport& transport) {
    if (transport.size() == 1) return;
    static std::array<float, 16> terms;  // which nobody writes to: the messages may go on behind the failure
    const bool is_short = transport.rank() == 0;
    const std::string text = error_of(
        [&] { transport.all_reduce_sum(terms.data(), (is_short ? 1 : 2) * transport.size(), c10::ScalarType::Float); });
    expect_contains(text, is_short ? "truncated: expected at most" : "as many elements on every rank");
  });
}

TEST_P(TransportFailures, TellsAllRanksThatOneHasAborted) {
  run([](Transport& transport) {
    if (transport.rank() == transport.size() - 1) {
      EXPECT_TRUE(transport.abort("the disk is full"));
      return;
    }
    int value = 0;
    try {
      transport.irecv(transport.size() - 1, 0, &value, sizeof(value)).wait();
      ADD_FAILURE() << "expected AbortedError";
    } catch (const AbortedError& error) {
      EXPECT_EQ(error.failed_rank(), transport.size() - 1);
      EXPECT_FALSE(transport.abort("another rank's failure counts"));
      EXPECT_STREQ(error.what(), ("rank " + std::to_string(transport.size() - 1) + " failed: the disk is full").c_str());
    }
    EXPECT_THROW(transport.barrier(), AbortedError);
    EXPECT_THROW((void)transport.isend(0, 0, &value, 4), AbortedError);
  });
}

// Receives, and refuses to send.
class SendsNothing final : public Transport {
 public:
  explicit SendsNothing(Transport& inner) : inner_(inner) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  Request isend(int, int, const DeviceMemory&) override { throw CommError({.operation = "send"}, "refused"); }
  Request irecv(int source, int tag, const DeviceMemory& into) override { return inner_.irecv(source, tag, into); }
  void progress() override { inner_.progress(); }
  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override { return inner_.group(ranks); }
  void broadcast(const DeviceMemory& bytes, int root) override { inner_.broadcast(bytes, root); }
  std::vector<std::string> all_gather(std::string_view bytes) override { return inner_.all_gather(bytes); }
  void barrier() override { inner_.barrier(); }
  void set_timeout(milliseconds timeout) override { inner_.set_timeout(timeout); }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    inner_.wait_until(is_done, where);
  }
  bool abort(std::string_view message) noexcept override { return inner_.abort(message); }
  void end_in_order() noexcept override { inner_.end_in_order(); }

 private:
  Transport& inner_;
};

// What another rank sends later is written there.
TEST_P(TransportFailures, KeepTheMemoryOfASumWhoseMessagesWereBegun) {
  run([](Transport& transport) {
    if (transport.size() == 1) return;
    SendsNothing refusing(transport);
    const auto terms = std::make_shared<std::vector<float>>(8 * static_cast<size_t>(transport.size()));
    const auto num_bytes = static_cast<int64_t>(terms->size() * sizeof(float));
    const auto begin = [&] { RunningSum(refusing, 3, {terms->data(), num_bytes}, terms, c10::ScalarType::Float); };
    EXPECT_THROW(begin(), CommError);
    EXPECT_GT(terms.use_count(), 1);
    transport.barrier();
    const std::array<float, 8> part{};
    std::vector<Request> sent;
    for (int other = 0; other < transport.size(); ++other) {
      if (other != transport.rank()) sent.push_back(transport.isend(other, 3, part.data(), sizeof part));
    }
    for (Request& request : sent) request.wait();
    transport.barrier();  // else a link's other end would wait for this one's answer
  });
}

}  // namespace
}  // namespace smp::runtime
