// The ring of gan: its points, and which modes some points cover.
#include "examples/gan/ring.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

namespace {

using namespace gan;

at::Generator seeded(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

TEST(Ring, ItsOwnPointsCoverAllModes) {
  const Coverage coverage = coverage_of(draw_ring(4000, seeded(1)));
  EXPECT_EQ(coverage.modes, 8);
  EXPECT_NEAR(coverage.near_mode, 1 - std::exp(-4.5), 0.01);  // within 3 deviations in the plane
}

TEST(Ring, PointsAreDrawnAlikeForOneSeed) {
  EXPECT_TRUE(torch::equal(draw_ring(10, seeded(1)), draw_ring(10, seeded(1))));
  EXPECT_FALSE(torch::equal(draw_ring(10, seeded(1)), draw_ring(10, seeded(2))));
}

TEST(Ring, AModeIsCoveredFromTwoPercentOfThePointsOn) {
  // 97 at one mode, 2 at the one across, 1 at a third.
  auto points = torch::tensor({2.0F, 0.0F}).repeat({100, 1});
  points.slice(0, 0, 2).copy_(torch::tensor({-2.0F, 0.0F}).expand({2, 2}));
  points[2].copy_(torch::tensor({0.0F, 2.0F}));
  EXPECT_EQ(coverage_of(points).modes, 2);
  EXPECT_DOUBLE_EQ(coverage_of(points).near_mode, 1);
}

TEST(Ring, PointsFarFromAllModesCoverNone) {
  EXPECT_EQ(coverage_of(torch::zeros({5, 2})).modes, 0);
  EXPECT_EQ(coverage_of(torch::full({5, 2}, std::nanf(""))).near_mode, 0);
  EXPECT_THROW(coverage_of(torch::zeros({0, 2})), c10::ValueError);
  EXPECT_THROW(coverage_of(torch::zeros({5, 3})), c10::ValueError);
}

}  // namespace
