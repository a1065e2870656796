// runtime/device/cuda, as it is, with LibTorch's part for CUDA, on NVIDIA's runtime and NCCL where they are none
// (tests/fake_cuda): streams do what they were given as late as CUDA allows, and kernels compute nothing.
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <optional>
#include <set>
#include <string>

#include "runtime/device/graph.h"
#include "runtime/device/lane.h"
#include "runtime/device/links.h"
#include "runtime/transport/linked_transport.h"
#include "runtime/transport/staged_transport.h"
#include "tests/fake_cuda/fake_cuda.h"
#include "tests/support/loopback_world.h"
#include "tests/support/own_stream.h"

namespace smp::runtime {
namespace {

constexpr size_t kLength = 1 << 16;

const Device& device() { return this_ranks_device(); }

/// Numbers in memory of the device, which are written and read in its order.
class Numbers {
 public:
  Numbers() : memory_(device().allocate(kLength)), pinned_(device().allocate_pinned(kLength)) {
    write('?');  // not what an earlier test has left there
    device().wait(device().record());
  }

  /// Does not wait. Once at most, until the device has been waited for.
  void begin_to_write(char value) {
    std::memset(pinned_.mutable_get(), value, kLength);
    device().start_copy(memory_.mutable_get(), pinned_.get(), kLength);
  }
  void write(char value) {
    const std::string bytes(kLength, value);
    device().start_copy(memory_.mutable_get(), bytes.data(), kLength);
  }
  void copy_to(Numbers& other) const { device().start_copy(other.memory_.mutable_get(), memory_.get(), kLength); }
  std::string read() const {
    std::string bytes(kLength, ' ');
    device().copy(bytes.data(), memory_.get(), kLength);
    return bytes;
  }
  bool are(char value) const { return read() == std::string(kLength, value); }

  DeviceMemory memory() { return {memory_.mutable_get(), kLength, device().type}; }

 private:
  c10::DataPtr memory_, pinned_;
};

class OnCuda : public testing::Test {
 protected:
  void SetUp() override { c10::impl::getDeviceGuardImpl(device().type)->synchronizeDevice(0); }
  void TearDown() override {
    EXPECT_EQ(fake_cuda::take_problems(), std::vector<std::string>());
    EXPECT_EQ(fake_cuda::num_communicators(), 0);
    fake_cuda::fail_after(-1);
  }
};

// What the whole file relies on.
TEST_F(OnCuda, StreamsDoNothingUntilTheHostWaits) {
  Numbers from, to;
  from.begin_to_write('a');
  from.copy_to(to);
  const Event both = device().record();
  EXPECT_FALSE(device().has_reached(both));
  EXPECT_EQ(*static_cast<const char*>(to.memory().data), '?');
  device().wait(both);
  EXPECT_TRUE(device().has_reached(both));
  EXPECT_TRUE(to.are('a'));
}

TEST_F(OnCuda, CopiesToTheHostAreThereAlsoInPinnedMemory) {
  Numbers from;
  from.begin_to_write('a');
  c10::DataPtr pinned = device().allocate_pinned(kLength);
  device().copy(pinned.mutable_get(), from.memory().data, kLength);
  EXPECT_EQ(std::string(static_cast<const char*>(pinned.get()), kLength), std::string(kLength, 'a'));
}

TEST_F(OnCuda, StreamsGoOnBehindEvents) {
  Numbers from, to;
  Event written;
  {
    const tests::OwnStream beside;
    from.begin_to_write('a');
    written = device().record();
  }
  device().go_on_behind(written);
  from.copy_to(to);
  EXPECT_TRUE(to.are('a'));
}

using Body = std::function<void(Transport&)>;

enum class Way { kOverNccl, kByTheHost };

class MessagesOnCuda : public OnCuda, public testing::WithParamInterface<Way> {
 protected:
  static void run(int num_ranks, const Body& body) {
    tests::run_ranks(num_ranks, [&](Transport& transport) {
      const tests::OwnStream stream;
      const std::shared_ptr<Transport> borrowed(std::shared_ptr<void>(), &transport);
      const auto on_device = GetParam() == Way::kOverNccl ? make_linked(borrowed, *device().links()) : make_staged(borrowed);
      body(*on_device);
      on_device->settle();
      transport.barrier();
    });
  }
};

TEST_P(MessagesOnCuda, ComeBehindWhatMadeThemAndBeforeWhatOverwritesThem) {
  run(2, [](Transport& transport) {
    constexpr int kMessages = 20;
    Numbers numbers;
    std::array<Numbers, kMessages> seen;
    for (int i = 0; i < kMessages; ++i) {
      if (transport.rank() == 0) {
        numbers.write(static_cast<char>('a' + i));
        Request sent = transport.isend(1, 7, numbers.memory());
        sent.wait("send");
        numbers.write('-');
      } else {
        transport.irecv(0, 7, numbers.memory()).wait("receive");
        numbers.copy_to(seen.at(static_cast<size_t>(i)));
      }
    }
    for (int i = 0; i < kMessages && transport.rank() == 1; ++i) {
      EXPECT_TRUE(seen.at(static_cast<size_t>(i)).are(static_cast<char>('a' + i))) << i;
    }
  });
}

TEST_P(MessagesOnCuda, GoBothWaysAtOnceInTheOrderOfTheirReceives) {
  run(3, [](Transport& transport) {
    const int next = (transport.rank() + 1) % 3, before = (transport.rank() + 2) % 3;
    Numbers first, second, got_first, got_second;
    first.begin_to_write(static_cast<char>('a' + transport.rank()));
    second.begin_to_write(static_cast<char>('x' + transport.rank()));
    Request requests[] = {transport.isend(next, 1, first.memory()), transport.isend(next, 2, second.memory()),
                          transport.irecv(before, 2, got_second.memory()), transport.irecv(before, 1, got_first.memory())};
    for (Request& request : requests) request.wait("exchange");
    EXPECT_TRUE(got_first.are(static_cast<char>('a' + before)));
    EXPECT_TRUE(got_second.are(static_cast<char>('x' + before)));
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, MessagesOnCuda, testing::Values(Way::kOverNccl, Way::kByTheHost),
                         [](const auto& way) { return way.param == Way::kOverNccl ? "OverNccl" : "ByTheHost"; });

// Whatever one end has been told to do before they know each other.
TEST_F(OnCuda, ALinkGivesItsTransfersInTheOrderInWhichTheyWereStarted) {
  constexpr size_t kTransfers = 3;
  const DeviceLinks& links = *device().links();
  const std::string name = links.new_name();
  const auto sender = links.connect(name, DeviceLinks::End::kSender),
             receiver = links.connect(name, DeviceLinks::End::kReceiver);
  std::array<Numbers, kTransfers> sent, received;
  for (Numbers& numbers : received) receiver->start(numbers.memory(), nullptr);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(sender->next_given());
  for (size_t i = 0; i < kTransfers; ++i) {
    sent.at(i).begin_to_write(static_cast<char>('a' + i));
    sender->start(sent.at(i).memory(), device().record());
  }
  for (size_t num_sent = 0, num_received = 0; num_sent + num_received < 2 * kTransfers;) {
    if (sender->next_given()) ++num_sent;
    if (const auto end = receiver->next_given()) {
      device().wait(*end);
      EXPECT_EQ(*static_cast<const char*>(received.at(num_received).memory().data), static_cast<char>('a' + num_received));
      ++num_received;
    }
  }
}

// Of every rank that has to do with it, and nobody waits for ever.
TEST_F(OnCuda, ALinkThatBreaksIsToldAtBothEnds) {
  fake_cuda::fail_after(2);
  tests::run_ranks(2, [](Transport& transport) {
    const tests::OwnStream stream;
    const std::shared_ptr<Transport> borrowed(std::shared_ptr<void>(), &transport);
    const auto linked = make_linked(borrowed, *device().links());
    std::string told;
    try {
      for (int i = 0; i < 5; ++i) {
        Numbers numbers;
        numbers.write('a');
        transport.rank() == 0 ? linked->isend(1, 7, numbers.memory()).wait("2F0")
                              : linked->irecv(0, 7, numbers.memory()).wait("2F0");
      }
    } catch (const std::exception& error) {
      told = error.what();
    }
    EXPECT_NE(told.find("remote process exited"), std::string::npos) << told;
  });
}

TEST_F(OnCuda, TheRestGoesOnBehindWhatALaneWasGiven) {
  const auto lane = device().new_lane();
  Numbers from, to;
  {
    const OnLane on_lane(lane.get());
    const JoinAtEnd joined(lane.get());
    from.begin_to_write('a');
  }
  from.copy_to(to);
  EXPECT_TRUE(to.are('a'));
}

// Memory of a lane goes back to it when it is freed, though the rest has been told to read it and has not come so far.
TEST_F(OnCuda, WhatALaneSharesIsUsedAgainBehindTheRest) {
  const auto lane = device().new_lane();
  Numbers seen;
  void* before = nullptr;
  {
    c10::Storage sum;
    {
      const OnLane on_lane(lane.get());
      sum = at::empty({kLength}, at::TensorOptions(device().type).dtype(at::kChar)).storage();
      const std::string bytes(kLength, 's');
      device().start_copy(sum.mutable_data(), bytes.data(), kLength);
      lane->join();
      lane->share(sum);
    }
    before = sum.mutable_data();
    device().start_copy(seen.memory().data, sum.data(), kLength);
  }
  {
    const OnLane on_lane(lane.get());
    const at::Tensor next = at::empty({kLength}, at::TensorOptions(device().type).dtype(at::kChar));
    EXPECT_NE(next.data_ptr(), before);
    const std::string bytes(kLength, '-');
    device().start_copy(next.data_ptr(), bytes.data(), kLength);
    device().wait(device().record());
  }
  EXPECT_TRUE(seen.are('s'));
}

TEST_F(OnCuda, ClocksTellTheTimesBetweenMarks) {
  const auto clock = device().new_clock();
  for (int series = 0; series < 2; ++series) {
    for (int i = 0; i < 3; ++i) clock->mark();
    EXPECT_EQ(clock->take_us(), (std::vector<double>{1000, 1000}));
  }
}

class GraphsOnCuda : public OnCuda {
 protected:
  static at::Tensor copy_of(const at::Tensor& tensor) {
    at::Tensor copy = at::empty({kLength}, at::TensorOptions(device().type).dtype(at::kChar));
    device().start_copy(copy.data_ptr(), tensor.data_ptr(), kLength);
    return copy;
  }
  static void write(const at::Tensor& tensor, char value) {
    const std::string bytes(kLength, value);
    device().start_copy(tensor.data_ptr(), bytes.data(), kLength);
  }
  static bool are(const at::Tensor& tensor, char value) {
    std::string bytes(kLength, ' ');
    device().copy(bytes.data(), tensor.data_ptr(), kLength);
    return bytes == std::string(kLength, value);
  }
  const at::Tensor input_ = at::empty({kLength}, at::TensorOptions(device().type).dtype(at::kChar));
};

TEST_F(GraphsOnCuda, DoWhatWasRecordedWithWhatTheirInputsHoldThen) {
  const auto first = device().new_graph(nullptr), second = device().new_graph(first.get());
  at::Tensor between, output;
  first->record([&] { between = copy_of(copy_of(input_)); });
  second->record([&] { output = copy_of(between); });
  for (const char value : {'a', 'b'}) {
    write(input_, value);
    first->replay(0);
    second->replay(0);
    EXPECT_TRUE(are(output, value));
  }
}

// The next one records, and what is not recorded goes on, as if it had not been.
TEST_F(GraphsOnCuda, ThatCannotHoldSomethingRefuseItAndLeaveNoTrace) {
  const auto first = device().new_graph(nullptr), broken = device().new_graph(first.get());
  first->record([&] { copy_of(input_); });
  EXPECT_THROW(broken->record([&] { (void)are(copy_of(input_), 'a'); }), c10::Error);
  EXPECT_THROW(broken->record([&] { TORCH_CHECK(false, "by the program itself"); }), c10::Error);
  write(input_, 'c');
  EXPECT_TRUE(are(copy_of(input_), 'c'));

  const auto whole = device().new_graph(first.get());
  at::Tensor output;
  whole->record([&] { output = copy_of(input_); });
  whole->replay(0);
  EXPECT_TRUE(are(output, 'c'));
}

// Behind what the last one needs, nothing is under way: LibTorch's own preparations of a recording neither.
TEST_F(GraphsOnCuda, DrawBehindWhatTheirRecordingGaveTheDevice) {
  const auto graph = device().new_graph(nullptr);
  graph->record([&] {
    graph->seed(3);
    (void)at::rand({8}, at::TensorOptions(device().type).dtype(at::kFloat));
  });
  graph->replay(1);
  device().wait(device().record());
  EXPECT_EQ(fake_cuda::num_undone(), 0);
}

TEST_F(GraphsOnCuda, RefuseAnOperatorThatDrawsMoreThanItsRange) {
  const auto graph = device().new_graph(nullptr);
  const auto draw = [&](int64_t numbers) {
    graph->record([&] {
      graph->seed(0);
      (void)at::rand({numbers}, at::TensorOptions(device().type).dtype(at::kHalf));
      graph->seed(1);
    });
  };
  constexpr int64_t kNumbers = int64_t{1} << 26;  // 2^18 of each of 256 threads
  std::string refusal;
  try {
    draw(kNumbers + 1024);
  } catch (const c10::Error& error) {
    refusal = error.what();
  }
  EXPECT_NE(refusal.find("got one before random operator 1 that has drawn more"), std::string::npos) << refusal;
}

// What a recording begins with writes to memory that others of this thread have freed, and may still be reading.
TEST_F(GraphsOnCuda, AreRecordedBehindWhatTheirThreadHasGivenTheDevice) {
  const auto* const guard = c10::impl::getDeviceGuardImpl(device().type);
  Numbers numbers;
  numbers.begin_to_write('a');
  std::optional<c10::Stream> recorded_on;
  device().new_graph(nullptr)->record([&] {
    recorded_on = guard->getStream(device().current());
    copy_of(input_);
  });
  guard->synchronizeStream(*recorded_on);
  EXPECT_EQ(*static_cast<const char*>(numbers.memory().data), 'a');
}

// LibTorch hands out those of its pool by turns, also to threads that know nothing of a recording.
TEST_F(GraphsOnCuda, AreRecordedOnAStreamThatNobodyElseHas) {
  const auto* const guard = c10::impl::getDeviceGuardImpl(device().type);
  const auto current = [&] { return guard->getStream(device().current()); };
  std::set<c10::StreamId> of_pool{current().id()};
  for (int i = 0; i < 64; ++i) of_pool.insert(guard->getStreamFromGlobalPool(device().current()).id());
  std::set<c10::StreamId> recorded_on;
  for (int i = 0; i < 3; ++i) {
    device().new_graph(nullptr)->record([&] {
      recorded_on.insert(current().id());
      copy_of(input_);
    });
  }
  EXPECT_EQ(recorded_on.size(), 1) << "memory is used again on its own stream alone";
  EXPECT_FALSE(of_pool.contains(*recorded_on.begin()));
}

TEST_F(GraphsOnCuda, UseTheMemoryAgainThatTheOneBeforeHasFreed) {
  const auto first = device().new_graph(nullptr), second = device().new_graph(first.get());
  const void* freed = nullptr;
  at::Tensor kept, made;
  first->record([&] {
    const at::Tensor gone = copy_of(input_);
    freed = gone.data_ptr();
    kept = copy_of(gone);
  });
  second->record([&] { made = copy_of(kept); });
  EXPECT_EQ(made.data_ptr(), freed);
  EXPECT_NE(made.data_ptr(), kept.data_ptr());
}

}  // namespace
}  // namespace smp::runtime
