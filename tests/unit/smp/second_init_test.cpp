// A second smp::init: what it takes over, and what comes too late.
#include <gtest/gtest.h>

#include "smp/init.h"
#include "smp/smp.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;
using tests::make_net;
using tests::run_smp_ranks;

constexpr auto kOff = LogLevel::kOff;

TEST(SecondInit, TakesOverWhatHasHadNoEffect) {
  run_smp_ranks(2, {.seed = 3, .log_level = kOff}, [] {
    init();
    EXPECT_EQ(config().seed, 3);
    init({.microbatches = 4, .pipeline = Pipeline::kSimple, .timeout_s = 60, .without_effect = {{"optimize", "speed"}}});
    EXPECT_EQ(config().microbatches, 4);
    EXPECT_EQ(config().pipeline, Pipeline::kSimple);
    EXPECT_EQ(config().seed, 3);
    EXPECT_EQ(config().pipeline_parallel_degree, 2);
    EXPECT_EQ(config().without_effect.at("optimize"), ConfigValue("speed"));
    DistributedModel model(make_net());
    auto train = step([](auto& own, const at::Tensor& x) {
      const at::Tensor loss = own(x).mean();
      own.backward(loss);
      return loss;
    });
    EXPECT_EQ(train(model, tests::rows(8, 8, 1)).size(), 4);
    init({.microbatches = 4, .without_effect = {{"optimize", "memory"}}});  // names what is in force, or steers nothing
  });
}

TEST(SecondInit, RefusesWhatHasHadAnEffect) {
  run_smp_ranks(2, {.log_level = kOff}, [] {
    const std::string groups = message_of([] { init({.pipeline_parallel_degree = 1, .microbatches = 2}); });
    EXPECT_TRUE(contains(groups,
                         "leave keys as they are that have had an effect, got other values for "
                         "pipeline_parallel_degree: 2 against 1 (in force against named)"))
        << groups;
    EXPECT_EQ(config().microbatches, 1);
    DistributedModel model(make_net());
    const std::string late = message_of([] { init({.microbatches = 2, .seed = 1}); });
    EXPECT_TRUE(contains(late,
                         "all of them where there is a model, got other values for microbatches: 1 against 2; seed: 0 "
                         "against 1"))
        << late;
    const std::string wrong = message_of([] { init({.microbatches = -4}); });
    EXPECT_TRUE(contains(wrong, "argument: microbatches: expected an integer")) << wrong;
  });
}

TEST(SecondInit, RefusesWhatDiffersBetweenRanks) {
  run_smp_ranks(2, {.log_level = kOff}, [] {
    const std::string text = message_of([] { init({.seed = 1 + rank()}); });
    EXPECT_TRUE(contains(text, "got a difference between rank 0 and rank 1: seed: 1 against 2")) << text;
    EXPECT_EQ(config().seed, 0);
    const std::string fits = message_of([] { init({.rank_speed = {1, 1, 1}}); });
    EXPECT_TRUE(contains(fits, "expected rank_speed to have one number for each of 2 pipeline ranks, got 3")) << fits;
  });
}

TEST(SecondInit, KeepsTheDegreeThatNobodyHasNamed) {
  run_smp_ranks(2, {.parallelism = Parallelism::kAuto, .log_level = kOff}, [] {
    init({.seed = 5});
    EXPECT_EQ(config().pipeline_parallel_degree, 2);
    EXPECT_EQ(config().seed, 5);
  });
}

}  // namespace
}  // namespace smp
