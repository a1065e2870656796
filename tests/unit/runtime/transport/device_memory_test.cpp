// Messages of a device's memory: who waits for whom, as a device that writes it down has seen it.
#include <gtest/gtest.h>

#include <future>

#include "runtime/transport/linked_transport.h"
#include "runtime/transport/loopback.h"
#include "runtime/transport/running_sum.h"
#include "runtime/transport/staged_transport.h"
#include "tests/support/recording_device.h"
#include "tests/support/thread_links.h"

namespace smp::runtime {
namespace {

using support::RecordingDevice;
using support::UseDevice;
using Log = std::vector<std::string>;

class DeviceMessages : public testing::Test {
 protected:
  DeviceMemory memory(std::string& bytes) const { return {bytes.data(), static_cast<int64_t>(bytes.size()), device_.type}; }

  const RecordingDevice device_;
  const UseDevice used_{device_};
  LoopbackWorld world_{2};
  std::string from_ = "numbers", into_ = std::string(7, ' ');
};

TEST_F(DeviceMessages, OfThreadsAreCopiedBehindBothSidesAndBothGoOnBehindTheCopy) {
  const auto sender = world_.transport(0), receiver = world_.transport(1);
  RecordingDevice::run_as(0);
  Request sent = sender->isend(1, 7, memory(from_));
  RecordingDevice::run_as(1);
  Request received = receiver->irecv(0, 7, memory(into_));  // comes second, and so moves them
  EXPECT_EQ(device_.take_log(),
            (Log{"0 records 0", "1 records 1", "1 behind 0", "1 behind 1", "1 copies", "1 waits", "1 records 2"}));
  EXPECT_EQ(received.wait(), 7);
  EXPECT_EQ(device_.take_log(), Log{"1 behind 2"});
  RecordingDevice::run_as(0);
  EXPECT_TRUE(sent.test());
  EXPECT_EQ(device_.take_log(), Log{"0 behind 2"});
  EXPECT_EQ(into_, from_);
}

TEST_F(DeviceMessages, ByWayOfTheHostLeaveWhenTheDeviceHasMadeThem) {
  const auto sender = make_staged(world_.transport(0)), receiver = make_staged(world_.transport(1));
  RecordingDevice::run_as(0);
  Request sent = sender->isend(1, 7, memory(from_));
  EXPECT_EQ(device_.take_log(), (Log{"0 copies", "0 records 0"}));
  RecordingDevice::run_as(1);
  Request received = receiver->irecv(0, 7, memory(into_));
  EXPECT_FALSE(received.test()) << "the device has not come so far";
  RecordingDevice::run_as(0);
  EXPECT_FALSE(sent.test());
  EXPECT_EQ(sent.wait(), 7);
  EXPECT_EQ(device_.take_log(), Log{"0 waits for 0"});
  RecordingDevice::run_as(1);
  EXPECT_EQ(received.wait(), 7);
  EXPECT_EQ(device_.take_log(), (Log{"1 copies", "1 records 1"}));
  EXPECT_EQ(into_, from_);
}

// AddressSanitizer sees it where they do not.
TEST_F(DeviceMessages, ByWayOfTheHostKeepTheirMemoryWhenTheirTransportEndsFirst) {
  const auto sender = make_staged(world_.transport(0));
  {
    const auto receiver = make_staged(world_.transport(1));
    const Request dropped = receiver->irecv(0, 7, memory(into_));
  }
  EXPECT_EQ(sender->isend(1, 7, memory(from_)).wait(), 7);
  EXPECT_EQ(into_, std::string(7, ' ')) << "nobody asks for it";
}

// Of what has been received, too, and is on its way to the device.
TEST_F(DeviceMessages, ByWayOfTheHostKeepTheirMemoryWhenTheirTransportEndsBeforeTheDeviceHasReadThem) {
  const auto sender = make_staged(world_.transport(0));
  const int before = device_.num_pinned();
  {
    const auto receiver = make_staged(world_.transport(1));
    Request sent = sender->isend(1, 7, memory(from_)), received = receiver->irecv(0, 7, memory(into_));
    sent.wait();
    EXPECT_EQ(received.wait(), 7);
  }
  EXPECT_EQ(device_.num_pinned(), before + 1);
}

TEST_F(DeviceMessages, ByWayOfTheHostHaveReachedTheDeviceWhenTheirTransportIsSettled) {
  const auto sender = make_staged(world_.transport(0)), receiver = make_staged(world_.transport(1));
  Request sent = sender->isend(1, 7, memory(from_)), received = receiver->irecv(0, 7, memory(into_));
  sent.wait();
  EXPECT_EQ(received.wait(), 7);
  RecordingDevice::run_as(1);
  device_.take_log();
  receiver->settle();
  EXPECT_EQ(device_.take_log(), Log{"1 waits for 1"});
}

// Else two ranks that send to each other and then wait for a message would keep back what the other waits for.
TEST_F(DeviceMessages, ByWayOfTheHostLeaveBeforeTheirRankWaitsForAnything) {
  const auto sender = make_staged(world_.transport(0)), receiver = make_staged(world_.transport(1));
  RecordingDevice::run_as(0);
  Request sent = sender->isend(1, 7, memory(from_));
  std::string answer = "back";
  Request answered = receiver->isend(0, 8, answer.data(), 4);
  std::string heard(4, ' ');
  EXPECT_EQ(sender->irecv(1, 8, heard.data(), 4).wait(), 4);
  EXPECT_EQ(heard, answer);
  EXPECT_EQ(receiver->irecv(0, 7, memory(into_)).wait(), 7) << "it was sent meanwhile";
  EXPECT_TRUE(sent.test() && answered.test());
}

TEST_F(DeviceMessages, OfOneTagKeepTheirOrderWhateverMemoryTheyAre) {
  const auto sender = make_staged(world_.transport(0)), receiver = make_staged(world_.transport(1));
  std::string second = "of host";
  Request first = sender->isend(1, 7, memory(from_)), then = sender->isend(1, 7, second.data(), 7);
  std::string got(7, ' ');
  Request a = receiver->irecv(0, 7, memory(into_)), b = receiver->irecv(0, 7, got.data(), 7);
  then.wait();
  first.wait();
  EXPECT_EQ(a.wait() + b.wait(), 14);
  EXPECT_EQ(into_ + got, from_ + second);
}

// Each end starts to move the message behind what it had given the device when it asked for it, in the order in which the
// receiver has found it; the host waits for the device only for memory that a sender may overwrite.
class MessagesOverLinks : public DeviceMessages {
 protected:
  MessagesOverLinks() {
    auto first = std::async(std::launch::async, [this] { return make_linked(world_.transport(0), links_); });
    receiver_ = make_linked(world_.transport(1), links_);
    sender_ = first.get();
  }

  const support::ThreadLinks links_{device_};
  std::shared_ptr<Transport> sender_, receiver_;
};

TEST_F(MessagesOverLinks, MoveWhenBothRanksAreThereAndTheReceiverGoesOnBehindThem) {
  RecordingDevice::run_as(0);
  Request sent = sender_->isend(1, 7, memory(from_));
  EXPECT_FALSE(sent.test());
  EXPECT_EQ(device_.take_log(), Log{"0 records 0"});
  RecordingDevice::run_as(1);
  Request received = receiver_->irecv(0, 7, memory(into_));
  EXPECT_FALSE(received.test()) << "the sender's device has not been given it: who waits for half a transfer answers nobody";
  EXPECT_EQ(device_.take_log(), (Log{"1 records 1", "1 behind 1", "1 records 2"}));
  RecordingDevice::run_as(0);
  EXPECT_FALSE(sent.test()) << "the device has not come so far";
  EXPECT_EQ(device_.take_log(), (Log{"0 behind 0", "0 records 3"}));
  RecordingDevice::run_as(1);
  EXPECT_EQ(received.wait(), 7);
  EXPECT_EQ(device_.take_log(), Log{"1 behind 2"});
  EXPECT_EQ(into_, from_);
  device_.reach_all();
  EXPECT_EQ(sent.wait(), 7);
  EXPECT_EQ(device_.take_log(), Log{});
}

TEST_F(DeviceMessages, TakeALinkForEachPairAndDirectionAndNoneForOthers) {
  device_.reach_all();
  LoopbackWorld world(3);
  const support::ThreadLinks links{device_};
  std::vector<std::future<std::shared_ptr<Transport>>> made;
  for (int rank = 0; rank < 3; ++rank)
    made.push_back(std::async(std::launch::async, [&, rank] { return make_linked(world.transport(rank), links); }));
  std::vector<std::shared_ptr<Transport>> ranks;
  for (auto& each : made) ranks.push_back(each.get());
  const auto send = [&](size_t source, size_t dest, const DeviceMemory& from, const DeviceMemory& into) {
    Request sent = ranks[source]->isend(static_cast<int>(dest), 7, from);
    Request received = ranks[dest]->irecv(static_cast<int>(source), 7, into);
    sent.wait();
    received.wait();
  };
  send(0, 1, memory(from_), memory(into_));
  send(0, 1, memory(from_), memory(into_));
  send(1, 0, memory(from_), memory(into_));
  send(1, 2, memory(from_), memory(into_));
  send(2, 2, memory(from_), memory(into_));
  send(2, 0, {from_.data(), 7}, {into_.data(), 7});
  send(2, 0, {from_.data(), 0, device_.type}, {into_.data(), 0, device_.type});
  EXPECT_EQ(links.ends(), (std::vector<std::pair<int, int>>{{1, 1}, {1, 1}, {1, 1}}));
}

TEST_F(MessagesOverLinks, ThatAreTooLongKeepTheirPlaceUntilTheyAreDropped) {
  device_.reach_all();
  std::string second = "again it", got(8, ' ');
  Request sent = sender_->isend(1, 7, memory(from_)), then = sender_->isend(1, 8, memory(second));
  {
    std::string small(3, ' ');
    Request refused = receiver_->irecv(0, 7, memory(small));
    EXPECT_THROW(refused.wait(), CommError);
    Request received = receiver_->irecv(0, 8, memory(got));
    EXPECT_THROW(refused.wait(), CommError) << "asked again";
    EXPECT_EQ(sent.wait(), 7) << "as one that was taken";
    EXPECT_EQ(then.wait(), 8);
    refused = {};
    EXPECT_EQ(received.wait(), 8);
  }
  EXPECT_EQ(got, second);
}

TEST_F(MessagesOverLinks, AreRefusedWhereOneSideGivesMemoryOfTheHost) {
  Request sent = sender_->isend(1, 7, from_.data(), 7);
  Request received = receiver_->irecv(0, 7, memory(into_));
  try {
    received.wait("2F0");
    FAIL() << into_;
  } catch (const CommError& error) {
    EXPECT_STREQ(
        error.what(),
        "receive of at most 7 bytes with tag 7, peer rank 0, action 2F0: expected a message of a device's memory, as "
        "that of the receive is, got one of the host's");
  }
  EXPECT_EQ(sent.wait(), 7);
}

// Two ranks' terms, in turn, until both have the sum. What the device of rank 0 was given to do.
class SumsOfADevice : public MessagesOverLinks {
 protected:
  Log run(Transport& first, Transport& second) {
    device_.take_log();
    RecordingDevice::run_as(0);
    RunningSum mine(first, 7, memory(here_), nullptr, c10::ScalarType::Float);
    RecordingDevice::run_as(1);
    RunningSum theirs(second, 7, memory(there_), nullptr, c10::ScalarType::Float);
    bool is_done = false;
    for (int turn = 0; !is_done && turn < 100; ++turn) {
      RecordingDevice::run_as(0);
      is_done = mine.advance();
      RecordingDevice::run_as(1);
      is_done = theirs.advance() && is_done;
    }
    EXPECT_TRUE(is_done);
    Log log = device_.take_log();
    std::erase_if(log, [](const std::string& does) { return does[0] != '0' || does.starts_with("0 records"); });
    return log;
  }

  void expect_sums() const {
    EXPECT_EQ(here_, (std::vector<float>{11, 22, 33, 44}));
    EXPECT_EQ(there_, here_);
  }

  DeviceMemory memory(std::vector<float>& terms) const {
    return {terms.data(), static_cast<int64_t>(terms.size() * sizeof(float)), device_.type};
  }

  std::vector<float> here_ = {1, 2, 3, 4}, there_ = {10, 20, 30, 40};
};

TEST_F(SumsOfADevice, AreMadeThereBehindWhatHasComeOverLinks) {
  device_.reach_all();
  const Log want = {"0 behind 0",  "0 behind 1",  "0 behind 6", "0 sums",  // 6: the end of the other's terms
                    "0 behind 10", "0 behind 12", "0 behind 11"};
  EXPECT_EQ(run(*sender_, *receiver_), want);
  expect_sums();
}

TEST_F(SumsOfADevice, AreMadeThereBehindWhatHasComeByWayOfTheHost) {
  device_.reach_all();
  EXPECT_EQ(run(*make_staged(world_.transport(0)), *make_staged(world_.transport(1))),
            (Log{"0 copies", "0 copies", "0 sums", "0 copies", "0 copies"}));
  expect_sums();
}

TEST_F(DeviceMessages, AreRefusedWhereTheDeviceIsNotTheRanks) {
  DeviceMemory other = memory(from_);
  other.device = c10::kXLA;
  EXPECT_THROW((void)world_.transport(0)->isend(1, 7, other), c10::ValueError);
  EXPECT_THROW((void)make_staged(world_.transport(0))->irecv(1, 7, other), c10::ValueError);
}

}  // namespace
}  // namespace smp::runtime
