// Homes of tensors: who has one, and that nobody takes a part for the whole.
#include "partitioner/plan/home.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "partitioner/partition/partition.h"
#include "tests/support/plan_cases.h"

namespace smp::partitioner {
namespace {

using testing::mlp;
using testing::on_ranks;

TEST(TensorHome, SaysWhichRanksHaveTheTensor) {
  const TensorHome tied({1, 3}), everywhere = TensorHome::on_all(2), nowhere;
  EXPECT_EQ(tied.owner(), 1);
  EXPECT_TRUE(tied.is_tied() && tied.is_on(3) && !tied.is_on(2));
  EXPECT_EQ(everywhere.whole_on(), (std::vector<int>{0, 1}));
  EXPECT_TRUE(nowhere.whole_on().empty() && !nowhere.is_on(0));
  EXPECT_EQ(tied, TensorHome({1, 3}));
}

TEST(TensorHome, RefusesToTakeAPartForTheTensor) {
  const TensorHome part({1}, {.index = 0, .count = 2});
  EXPECT_FALSE(part == TensorHome({1}));
  EXPECT_THROW(part.whole_on(), c10::NotImplementedError);
  EXPECT_THROW(part.owner(), c10::NotImplementedError);
  EXPECT_THROW(part.is_on(1), c10::NotImplementedError);
  EXPECT_THROW(part.is_tied(), c10::NotImplementedError);
}

TEST(TensorHome, OfAPartMakesNoPlan) {
  const Graph graph = mlp(2);
  PartitionOptions options = on_ranks(2);
  const std::string& weight = graph.values[partition(graph, options).stages.front().parameters.front()].name;
  options.placement.homes[weight] = TensorHome({1}, {.index = 1, .count = 2});
  EXPECT_THROW(partition(graph, options), c10::NotImplementedError);
}

}  // namespace
}  // namespace smp::partitioner
