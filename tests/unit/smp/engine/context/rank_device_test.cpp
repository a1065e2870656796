// Which device a rank computes on, where all ranks have one of a kind, share some, or have none.
#include "smp/engine/context/rank_device.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <mutex>
#include <set>

#include "tests/support/loopback_world.h"
#include "tests/support/recording_device.h"
#include "tests/support/thread_links.h"

namespace smp::engine {
namespace {

using runtime::Transport;
using support::RecordingDevice;

class RankDevices : public testing::Test {
 protected:
  RankDevices() {
    set_log_sink([this](LogLevel severity, std::string_view message, std::string_view, int) {
      const std::lock_guard lock(mutex_);
      if (severity == LogLevel::kWarning) warnings_.emplace_back(message);
    });
  }
  ~RankDevices() override { set_log_sink({}); }

  static RankDevice settle(const FoundDevice& found, Transport& world, const Config& config = {}) {
    return settle_on(found, config, {.local_rank = world.rank()}, world, Logger());
  }
  /// What three ranks settle on, by rank.
  std::map<int, RankDevice> of_three(const RecordingDevice& device, bool nccl) {
    const support::UseDevice used(device);
    std::map<int, RankDevice> taken;
    tests::run_ranks(3, [&](Transport& world) {
      const RankDevice own = settle({.device = &device}, world, {.device = DeviceKind::kCuda, .nccl = nccl});
      const std::lock_guard lock(mutex_);
      taken.emplace(world.rank(), own);
    });
    return taken;
  }
  /// What the ranks of which rank 1 has found `other` throw.
  std::set<std::string> refusals(const FoundDevice& other) {
    const RecordingDevice device;
    const support::UseDevice used(device);
    std::multiset<std::string> texts;
    tests::run_ranks(3, [&](Transport& world) {
      try {
        settle(world.rank() == 1 ? other : FoundDevice{.device = &device}, world);
      } catch (const c10::Error& error) {
        const std::lock_guard lock(mutex_);
        texts.insert(error.what_without_backtrace());
      }
    });
    EXPECT_EQ(texts.size(), 3) << "each rank";
    return {texts.begin(), texts.end()};
  }

  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

TEST_F(RankDevices, AreThoseOfTheLocalRanksWithLinksWhereEachHasItsOwn) {
  const support::ThreadLinks links;
  const RecordingDevice device(3, &links);
  for (const auto& [rank, own] : of_three(device, /*nccl=*/true)) {
    EXPECT_EQ(own.index, rank);
    EXPECT_EQ(own.links, &links);
  }
  for (const auto& [rank, own] : of_three(device, /*nccl=*/false)) EXPECT_EQ(own.links, nullptr);
  EXPECT_EQ(warnings_, std::vector<std::string>{});
}

TEST_F(RankDevices, AreSharedWithOneWarningWhereThereAreFewer) {
  const support::ThreadLinks links;
  for (const auto& [rank, own] : of_three(RecordingDevice(2, &links), /*nccl=*/true)) {
    EXPECT_EQ(own.index, rank % 2);
    EXPECT_EQ(own.links, nullptr) << "NCCL has no two ranks on one device";
  }
  ASSERT_EQ(warnings_.size(), 1);
  EXPECT_EQ(warnings_[0].find("expected a GPU for each of 3 ranks, got 2: ranks share them"), 0) << warnings_[0];
}

TEST_F(RankDevices, AreRefusedOnAllRanksWhereOneHasNone) {
  const std::set<std::string> texts = refusals({.why_none = "no driver"});
  EXPECT_EQ(texts, std::set<std::string>{"smp::init: rank 1: no driver"});
}

TEST_F(RankDevices, AreRefusedWhereTheyAreOfTwoKinds) {
  const std::set<std::string> texts = refusals({.device = &runtime::host()});
  ASSERT_EQ(texts.size(), 1);
  EXPECT_EQ(
      texts.begin()->find("smp::init: expected one kind of device on all ranks, got privateuseone on rank 0 and cpu on "
                          "rank 1. Set device to \"cpu\""),
      0)
      << *texts.begin();
}

}  // namespace
}  // namespace smp::engine
