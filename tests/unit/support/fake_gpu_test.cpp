// That a GPU that is none finds what is out of order, and nothing else.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/fake_gpu/order.h"

namespace smp::fake_gpu {
namespace {

constexpr Stream kOne = 101, kOther = 102;
constexpr int64_t kBytes = 1024;

class OnStreams : public testing::Test {
 protected:
  ~OnStreams() override {
    Gpu::exchange(0);
    memory_.clear();
    found();
  }

  void on(Stream stream, bool writes, int64_t begin = 0, int64_t end = kBytes) {
    Gpu::exchange(stream);
    const std::vector<Range> ranges = gpu_.ranges(static_cast<char*>(memory_.get()) + begin, end - begin);
    writes ? gpu_.launch("a write", {}, ranges) : gpu_.launch("a read", ranges, {});
  }
  void order() { gpu_.go_on_behind(kOther, gpu_.record(kOne)); }
  /// What has been found last, since the last call.
  std::string found() {
    const std::vector<std::string> all = gpu_.take_problems();
    return all.empty() ? "" : all.back();
  }

  Gpu& gpu_ = Gpu::the();
  c10::DataPtr memory_ = [this] {
    Gpu::exchange(kOne);
    return gpu_.allocate(kBytes);
  }();
};

TEST_F(OnStreams, ReadsBehindWritesAreOrderedByEvents) {
  on(kOne, true);
  on(kOther, false);
  EXPECT_EQ(found(),
            "a read on stream 102 reads bytes of 1024 that a write on stream 101 writes, and nothing orders the two");
  on(kOne, true);
  EXPECT_EQ(found(),
            "a write on stream 101 writes bytes of 1024 that a read on stream 102 reads, and nothing orders the two");
  gpu_.wait(gpu_.record(kOther));  // the host
  on(kOne, true);
  order();
  on(kOther, false);
  on(kOther, true);
  EXPECT_EQ(found(), "");
}

TEST_F(OnStreams, EventsOrderWhatCameBeforeThemAlone) {
  on(kOne, true);
  const Recorded early = gpu_.record(kOne);
  on(kOne, true);
  gpu_.go_on_behind(kOther, early);
  on(kOther, false);
  EXPECT_NE(found(), "");
}

TEST_F(OnStreams, TwoReadsAndOtherBytesNeedNoOrder) {
  on(kOne, true, 0, 512);
  on(kOther, true, 512, 1024);
  on(kOne, false, 0, 512);
  EXPECT_EQ(found(), "");
  on(kOther, false, 511, 1024);
  EXPECT_NE(found(), "");
}

TEST_F(OnStreams, AnEventIsReachedWhenTheHostHasAskedForLong) {
  on(kOne, true);
  Recorded event = gpu_.record(kOne);
  EXPECT_FALSE(gpu_.has_reached(event));
  while (!gpu_.has_reached(event)) continue;
  on(kOther, false);
  EXPECT_EQ(found(), "");
}

TEST_F(OnStreams, MemoryIsGivenBackBehindAllThatUsesIt) {
  on(kOne, true);
  order();
  on(kOther, false);
  memory_.clear();
  EXPECT_EQ(found(), "memory of stream 101 is free for it while stream 102 may not have come to a read");
  Gpu::exchange(kOne);
  memory_ = gpu_.allocate(kBytes);
  on(kOther, true);
  gpu_.share(memory_, kOther);
  memory_.clear();
  EXPECT_EQ(found(), "");
}

TEST_F(OnStreams, MemoryOfAPoolIsUsedAgainAtOnce) {
  Gpu::pool_of_thread() = std::make_shared<Pool>();
  const void* const first = gpu_.allocate(kBytes).get();
  EXPECT_EQ(gpu_.allocate(kBytes).get(), first);
  Gpu::pool_of_thread().reset();
}

TEST_F(OnStreams, MemoryOfTheHostIsThereWhenTheHostHasWaited) {
  const c10::DataPtr pinned = gpu_.allocate_pinned(kBytes);
  auto* const bytes = static_cast<char*>(pinned.get());
  Gpu::exchange(kOne);
  std::memset(bytes, 1, kBytes);
  gpu_.start_copy(memory_.get(), bytes, kBytes);
  gpu_.wait(gpu_.record(kOne));
  std::memset(bytes, 2, kBytes);
  gpu_.start_copy(bytes, memory_.get(), kBytes);
  EXPECT_NE(bytes[7], 1);
  gpu_.wait(gpu_.record(kOne));
  EXPECT_EQ(bytes[7], 1);
  EXPECT_EQ(found(), "");

  gpu_.start_copy(memory_.get(), bytes, kBytes);
  bytes[7] = 3;
  gpu_.wait(gpu_.record(kOne));
  EXPECT_EQ(found(), "memory of the host has changed before stream 101 had read it");
}

TEST_F(OnStreams, PinnedMemoryStaysUntilTheHostHasWaited) {
  c10::DataPtr pinned = gpu_.allocate_pinned(kBytes);
  Gpu::exchange(kOne);
  gpu_.start_copy(pinned.get(), memory_.get(), kBytes);
  pinned.clear();
  EXPECT_EQ(found(), "pinned memory ends before the host has waited for the copy that uses it");
}

}  // namespace
}  // namespace smp::fake_gpu
