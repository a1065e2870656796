// smp::num_graphs: how many graphs the steps of a program make.
#include <gtest/gtest.h>

#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

TEST(NumGraphs, EachShapeAndModeMakesOneOnEveryRank) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Model model(make_net());
    auto step = tests::training_step(model);
    EXPECT_EQ(num_graphs(), 0);
    const auto train = [&](int64_t size) { step(rows(size, 8, 1), rows(size, 4, 2)); };
    for (int i = 0; i < 3; ++i) train(4);
    EXPECT_EQ(num_graphs(), 1);
    train(6);
    train(4);
    EXPECT_EQ(num_graphs(), 2);
    model.eval();
    train(6);
    EXPECT_EQ(num_graphs(), 3);
    model.train();
    train(6);
    EXPECT_EQ(num_graphs(), 3);
  });
}

TEST(NumGraphs, AGraphThatWasForgottenCountsAgain) {
  run_smp_ranks(1, {.max_cached_graphs = 1}, [] {
    Model model(make_net());
    auto step = tests::training_step(model);
    for (int64_t size : {4, 6, 4}) step(rows(size, 8, 1), rows(size, 4, 2));
    EXPECT_EQ(num_graphs(), 3);
  });
}

TEST(NumGraphs, ThatAreForgottenAreWarnedOfOnce) {
  testing::internal::CaptureStderr();
  run_smp_ranks(1, {.max_cached_graphs = 2, .log_level = LogLevel::kWarning}, [] {
    Model model(make_net());
    auto step = tests::training_step(model);
    for (int64_t size = 2; size < 20; size += 2) step(rows(size, 8, 1), rows(size, 4, 2));
  });
  const std::string text = testing::internal::GetCapturedStderr(),
                    warning = "2 programs have been captured and forgotten again";
  ASSERT_NE(text.find(warning), std::string::npos) << text;
  EXPECT_EQ(text.find("captured and forgotten", text.find(warning) + warning.size()), std::string::npos) << text;
}

TEST(NumGraphs, IsRefusedBeforeInit) { EXPECT_THROW(num_graphs(), c10::Error); }

}  // namespace
}  // namespace smp
