// Measured models (PipeDream's profiles) split into 2, 4, 8 and 16 stages: near the optimum, and how far from the bound.
#include "tests/support/profiles.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "partitioner/partition/contiguous.h"
#include "tests/support/chains.h"

namespace smp::partitioner {
namespace {

using smp::testing::chain_of;
using smp::testing::Profile;
using smp::testing::read_profile;

std::string profile_path(const std::string& model) {
  return std::string(SMP_TEST_DATA_DIR) + "/profiles/" + model + ".graph";
}

class Profiles : public ::testing::TestWithParam<std::string> {};

void expect_consistent(const Chain& chain, const ChainSplit& split) {
  ASSERT_EQ(split.num_used_stages, chain.num_stages());
  for (int s = 0; s < chain.num_stages(); ++s) ASSERT_LT(split.cuts[s], split.cuts[s + 1]);
  const double slowest_us = smp::testing::reference_slowest_us(chain, split.cuts);
  EXPECT_NEAR(slowest_us, split.slowest_stage_us, 1e-9 * slowest_us);
  EXPECT_GE(split.slowest_stage_us, smp::testing::lower_bound_us(chain) * (1 - 1e-12));
}

TEST_P(Profiles, SplitIsOptimalAndItsGapIsPrinted) {
  const Profile profile = read_profile(profile_path(GetParam()));
  for (const double gigabytes_per_second : {1e9, 12.0}) {
    for (const int num_stages : {2, 4, 8, 16}) {
      const Chain chain = chain_of(profile, num_stages, gigabytes_per_second);
      const ChainSplit split = split_chain(chain);
      expect_consistent(chain, split);
      const auto expected = smp::testing::split_by_table(chain);
      ASSERT_TRUE(expected);
      EXPECT_NEAR(split.least_us, expected->slowest_stage_us, 1e-9 * expected->slowest_stage_us);
      EXPECT_LE(split.slowest_stage_us, 1.07 * split.least_us);
      const double bound_us = smp::testing::lower_bound_us(chain);
      std::printf("%-13s K=%-2d link %-8s slowest %10.1f us, bound %10.1f us, gap %5.1f %%\n", GetParam().c_str(),
                  num_stages, gigabytes_per_second > 1e3 ? "free" : "12 GB/s", split.slowest_stage_us, bound_us,
                  100 * (split.slowest_stage_us / bound_us - 1));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(PipeDream, Profiles,
                         ::testing::Values("alexnet", "densenet121", "gnmt", "inception_v3", "resnet18", "resnet50",
                                           "vgg16"),
                         [](const auto& model) { return model.param; });

TEST(ReadProfile, ParsesNodesEdgesAndSeveralOutputs) {
  const Profile profile = read_profile(profile_path("gnmt"));
  ASSERT_GT(profile.nodes.size(), 40u);
  const auto lstm = std::find_if(profile.nodes.begin(), profile.nodes.end(),
                                 [](const auto& node) { return node.layer == "LSTM(2048, 1024)"; });
  ASSERT_NE(lstm, profile.nodes.end());
  EXPECT_EQ(lstm->forward_us, 3190);
  EXPECT_EQ(lstm->backward_us, 5348);
  EXPECT_EQ(lstm->activation_bytes, 6291456 + 2 * 131072);
  for (const auto& [from, to] : profile.edges) EXPECT_LT(from, to);
}

TEST(ReadProfile, MissingFileIsRefused) { EXPECT_THROW(read_profile(profile_path("nothing")), c10::ValueError); }

}  // namespace
}  // namespace smp::partitioner
