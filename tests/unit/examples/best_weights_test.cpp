// Which weights the example keeps, and what comes back.
#include "examples/transformer_lm/best_weights.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace transformer_lm {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// One parameter; an optimizer changes it in place.
struct Weights {
  at::Tensor tensor = at::full({3}, 0.0).set_requires_grad(true);
  BestWeights::Parameters named() const { return {{"weight", tensor}}; }
  void become(double value) { tensor.detach().fill_(value); }
  double value() const { return tensor.detach()[0].item<double>(); }
};

double restored(const std::vector<double>& losses) {
  Weights weights;
  BestWeights best;
  for (const double loss : losses) {
    weights.become(loss);
    best.offer(loss, weights.named());
  }
  weights.become(-1);
  best.restore(weights.named());
  return weights.value();
}

TEST(BestWeights, AreThoseOfTheLowestLoss) {
  EXPECT_EQ(restored({3, 2, 2.5}), 2);
  EXPECT_EQ(restored({2, 3}), 2);
}

TEST(BestWeights, OfADivergedEpochAreNotKept) {
  EXPECT_EQ(restored({3, kNan, 4}), 3);
  EXPECT_EQ(restored({kNan, kInfinity, 4, kNan}), 4);
  EXPECT_EQ(restored({3, -kInfinity}), 3);
}

TEST(BestWeights, AreEmptyUntilALossIsFinite) {
  Weights weights;
  BestWeights best;
  for (const double loss : {kInfinity, kNan, -kInfinity}) {
    best.offer(loss, weights.named());
    EXPECT_TRUE(best.is_empty()) << loss;
    EXPECT_EQ(best.loss(), kInfinity);
  }
  best.offer(5, weights.named());
  EXPECT_FALSE(best.is_empty());
  EXPECT_EQ(best.loss(), 5);
}

TEST(BestWeights, GoBackIntoTheSameParametersOnly) {
  Weights weights;
  BestWeights best;
  best.offer(1, weights.named());
  EXPECT_THROW(best.restore({}), c10::ValueError);
  EXPECT_THROW(best.restore({{"bias", weights.tensor}}), c10::ValueError);
}

TEST(BestWeights, OfARankWithoutParametersAreKeptToo) {
  BestWeights best;
  best.offer(1, {});
  EXPECT_FALSE(best.is_empty());
  best.restore({});
}

}  // namespace
}  // namespace transformer_lm
