// Parameters and buffers on their ranks: who holds which, what the others keep of them, and how equal values reach all
// holders.
#include "runtime/placement/placement.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "examples/common/tensor_memory.h"
#include "runtime/delayed/construction.h"
#include "runtime/libtorch/unmade.h"
#include "runtime/transport/error.h"
#include "tests/support/bits.h"
#include "tests/support/graph_builder.h"
#include "tests/support/loopback_world.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using partitioner::Graph;
using partitioner::Plan;
using partitioner::StagePlan;
using partitioner::ValueId;
using partitioner::ValueKind;
using smp::testing::GraphBuilder;
using support::contains;

/// A plan whose stages are on `ranks` and read these values; placement looks at nothing else.
Plan plan_of_readers(const std::vector<std::pair<int, std::vector<ValueId>>>& stages) {
  Plan plan;
  for (const auto& [rank, values] : stages)
    plan.stages.push_back({.rank = rank, .nodes = {}, .parameters = values, .modules = {}, .cost = {}});
  return plan;
}

class HomesOf : public ::testing::Test {
 protected:
  GraphBuilder g_;
  const ValueId first_ = g_.parameter("first", {2}), tied_ = g_.parameter("tied", {2}), last_ = g_.buffer("last", {2});
  const Graph graph_ = g_.build();
  const Bindings bindings_{{{ValueKind::kParameter, "first", at::ones({2})},
                            {ValueKind::kParameter, "tied", at::ones({2})},
                            {ValueKind::kBuffer, "last", at::ones({2})},
                            {ValueKind::kParameter, "unread", at::ones({2})}}};
};

TEST_F(HomesOf, TensorsAreTheRanksOfTheStagesThatReadThem) {
  const Plan plan = plan_of_readers({{0, {first_}}, {1, {tied_}}, {2, {tied_, last_}}});
  EXPECT_EQ(homes_of(graph_, plan, bindings_),
            (TensorHomes{{"first", {{0}}}, {"tied", {{1, 2}}}, {"last", {{2}}}, {"unread", {{0}}}}));
}

TEST_F(HomesOf, SeveralStagesOfOneRankAreOneRank) {
  const Plan plan = plan_of_readers({{1, {first_}}, {0, {last_}}, {1, {first_, tied_}}});
  const TensorHomes homes = homes_of(graph_, plan, bindings_);
  EXPECT_EQ(homes.at("first").whole_on(), std::vector<int>{1});
  EXPECT_EQ(homes.at("tied").whole_on(), std::vector<int>{1});
  EXPECT_EQ(homes.at("last").whole_on(), std::vector<int>{0});
}

TEST_F(HomesOf, TensorsOnOneStorageAreAllRanksThatReadOneOfThem) {
  const at::Tensor whole = at::ones({4});
  const Bindings views({{ValueKind::kParameter, "first", whole.slice(0, 0, 2)},
                        {ValueKind::kParameter, "tied", whole.slice(0, 2, 4)},
                        {ValueKind::kBuffer, "last", at::ones({2})}});
  const TensorHomes homes = homes_of(graph_, plan_of_readers({{0, {first_}}, {1, {last_}}, {2, {tied_}}}), views);
  EXPECT_EQ(homes, (TensorHomes{{"first", {{0, 2}}}, {"tied", {{0, 2}}}, {"last", {{1}}}}));
}

/// A model on two pipeline ranks: one tensor each, and one on both.
struct PlacedModel {
  explicit PlacedModel(double number = 1)
      : front(at::full({3}, number).requires_grad_()),
        tied(at::full({2, 3}, number + 0.25).t().requires_grad_()),
        back(at::full({4}, number + 0.5)) {}
  at::Tensor front, tied, back;
  Bindings bindings{
      {{ValueKind::kParameter, "front", front}, {ValueKind::kParameter, "tied", tied}, {ValueKind::kBuffer, "back", back}}};
  TensorHomes homes{{"front", {{0}}}, {"tied", {{0, 1}}}, {"back", {{1}}}};
};

TEST(ReleaseOthers, KeepsWhatThisRankHoldsAndTheSizesOfTheOthers) {
  PlacedModel model;
  model.front.mutable_grad() = at::ones({3});
  model.tied.mutable_grad() = at::ones({3, 2});
  release_others(model.homes, model.bindings, 1);
  support::expect_bit_equal(model.tied, at::full({3, 2}, 1.25), "tied");
  support::expect_bit_equal(model.back, at::full({4}, 1.5), "back");
  EXPECT_TRUE(model.tied.grad().defined());
  EXPECT_EQ(model.front.sizes(), at::IntArrayRef({3}));
  EXPECT_TRUE(model.front.requires_grad());
  EXPECT_FALSE(model.front.grad().defined()) << "gradients take memory too";
  EXPECT_EQ(model.front.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), nullptr);
}

TEST(ReleaseOthers, AccessToTheDataNamesTensorOwnerAndWayOut) {
  PlacedModel model;
  release_others(model.homes, model.bindings, 0);
  const std::vector<std::function<void()>> accesses{[&] { model.back.data_ptr(); }, [&] { model.back.add(1); },
                                                    [&] { model.back.select(0, 1).item(); }};
  for (const auto& access : accesses) {
    const std::string text = support::message_of<c10::Error>(access);
    EXPECT_TRUE(contains(text, "the data of 'back' live on pipeline rank 1, this is rank 0.")) << text;
    EXPECT_TRUE(contains(text, "DistributedModel::state_dict()") && contains(text, "local_parameters()")) << text;
  }
}

TEST(ReleaseOthers, TensorOnTheStorageOfOneThatStaysIsThereToo) {
  const at::Tensor whole = at::arange(6, at::kFloat);
  const Bindings bindings(
      {{ValueKind::kParameter, "left", whole.slice(0, 0, 3)}, {ValueKind::kParameter, "right", whole.slice(0, 3)}});
  release_others({{"left", {{0}}}, {"right", {{1}}}}, bindings, 1);
  support::expect_bit_equal(whole, at::arange(6, at::kFloat), "the storage");
}

TEST(MakeLocalValues, OfThisRankAloneAndAsIfTheyHadBeenMadeAtOnce) {
  std::vector<at::Tensor> made;
  {
    const ConstructionScope delayed;
    made = {at::full({3}, 2.0), at::full({3}, 3.0), at::arange(4, at::kFloat).mul(0.5)};
  }
  const Bindings bindings({{ValueKind::kParameter, "here", made[0]},
                           {ValueKind::kParameter, "there", made[1]},
                           {ValueKind::kBuffer, "both", made[2]}});
  const TensorHomes homes{{"here", {{1}}}, {"there", {{0}}}, {"both", {{0, 1}}}};
  for (const at::Tensor& tensor : made) ASSERT_TRUE(is_unmade(tensor));
  make_local_values(homes, bindings, 1);
  support::expect_bit_equal(made[0], at::full({3}, 2.0), "here");
  support::expect_bit_equal(made[2], at::arange(4, at::kFloat).mul(0.5), "both");
  EXPECT_TRUE(is_unmade(made[1]));
}

TEST(BroadcastTensors, GiveTheSourcesValuesInEveryGeometry) {
  tests::run_ranks(3, [](Transport& group) {
    const double own = group.rank();
    const at::Tensor dense = at::full({4}, own), transposed = at::full({2, 3}, own).t(), whole = at::full({4, 4}, own);
    const at::Tensor part = whole.slice(1, 1, 3);
    broadcast_tensors({dense, transposed, part}, group, 2);
    support::expect_bit_equal(dense, at::full({4}, 2.0), "dense");
    support::expect_bit_equal(transposed, at::full({3, 2}, 2.0), "transposed");
    support::expect_bit_equal(part, at::full({4, 2}, 2.0), "a part of another tensor");
    support::expect_bit_equal(whole.select(1, 0), at::full({4}, own), "the rest of that");
    EXPECT_EQ(transposed.strides(), at::IntArrayRef({1, 3}));
  });
}

TEST(BroadcastTensors, ThatFailLeaveTheirBufferToTheTransport) {
  const auto run = [](Transport& group) {
    if (group.rank() == 1) throw std::runtime_error("gone");
    const at::Tensor column = at::zeros({1000, 2}).select(1, 0);
    const examples::TensorMemory memory;
    EXPECT_THROW(broadcast_tensors({column}, group, 1), CommError);
    EXPECT_EQ(memory.current_bytes(), 4000) << "a dense copy of the column";
  };
  EXPECT_THROW(tests::run_ranks(2, run), std::runtime_error);
}

/// This rank of two replicas of two pipeline ranks.
struct TwoByTwo {
  explicit TwoByTwo(Transport& world)
      : pipeline(world.group(world.rank() < 2 ? std::vector{0, 1} : std::vector{2, 3})),
        replicas(world.group(world.rank() % 2 == 0 ? std::vector{0, 2} : std::vector{1, 3})) {}
  std::shared_ptr<Transport> pipeline, replicas;
};

TEST(Synchronise, GivesHoldersTheValuesOfTheOwnerOfTheFirstReplica) {
  tests::run_ranks(4, [](Transport& world) {
    const TwoByTwo groups(world);
    const bool is_front = groups.pipeline->rank() == 0;
    const double own = 10.0 * (world.rank() + 1);
    PlacedModel model(own);
    synchronise(model.homes, model.bindings, *groups.pipeline, *groups.replicas);
    support::expect_bit_equal(model.tied, at::full({3, 2}, 10.25), "tied: of rank 0 of the world");
    support::expect_bit_equal(model.front, at::full({3}, is_front ? 10.0 : own),
                              "front: of rank 0 for rank 2, untouched elsewhere");
    support::expect_bit_equal(model.back, at::full({4}, is_front ? own + 0.5 : 20.5), "back: of rank 1 for rank 3");
    EXPECT_TRUE(model.tied.is_leaf() && model.tied.requires_grad());
  });
}

TEST(Synchronise, NeedsNoDataOfTensorsThatAreReleased) {
  tests::run_ranks(4, [](Transport& world) {
    const TwoByTwo groups(world);
    PlacedModel model(world.rank());
    release_others(model.homes, model.bindings, groups.pipeline->rank());
    synchronise(model.homes, model.bindings, *groups.pipeline, *groups.replicas);
    support::expect_bit_equal(model.tied, at::full({3, 2}, 0.25), "tied");
  });
}

}  // namespace
}  // namespace smp::runtime
