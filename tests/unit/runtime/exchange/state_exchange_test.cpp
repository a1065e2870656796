// States from several ranks over loopback: all know what is offered, and each tensor reaches the ranks of its home.
#include "runtime/exchange/state_exchange.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>
#include <stdexcept>

#include "examples/common/tensor_memory.h"
#include "runtime/transport/error.h"
#include "tests/support/bits.h"
#include "tests/support/loopback_world.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using State = std::map<std::string, at::Tensor>;
using Group = std::shared_ptr<Transport>;
using support::contains;
using support::expect_bit_equal;

/// What each rank does, as `pipeline_ranks` times `num_replicas` threads.
void run_replicas(int pipeline_ranks, int num_replicas,
                  const std::function<void(const Group& pipeline, const Group& replicas)>& fn) {
  tests::run_ranks(pipeline_ranks * num_replicas, [&](Transport& world) {
    const int first = world.rank() / pipeline_ranks * pipeline_ranks;
    std::vector<int> pipeline, replicas;
    for (int r = 0; r < pipeline_ranks; ++r) pipeline.push_back(first + r);
    for (int r = world.rank() % pipeline_ranks; r < world.size(); r += pipeline_ranks) replicas.push_back(r);
    const auto pipeline_group = world.group(pipeline), replica_group = world.group(replicas);
    fn(pipeline_group, replica_group);
  });
}

TEST(GatherFromFirstReplica, GivesEveryRankTheBytesOfReplica0ByPipelineRank) {
  run_replicas(3, 2, [](const Group& pipeline, const Group& replicas) {
    const std::string own =
        replicas->rank() > 0 ? "does not count" : std::string(static_cast<size_t>(pipeline->rank()), 'x');
    EXPECT_EQ(gather_from_first_replica(own, *pipeline, *replicas), (std::vector<std::string>{"", "x", "xx"}));
  });
}

TEST(Offers, SurviveTheirWay) {
  const State own{{"", at::ones({})},
                  {"empty", at::empty({0, 3})},
                  {"half", at::ones({2, 1}, at::kHalf)},
                  {"steps", at::ones({3}, at::kLong)}};
  const auto offered = StateExchange::decode(StateExchange::encode(own, "no file"));
  EXPECT_EQ(offered.error, "no file");
  ASSERT_EQ(offered.offers.size(), own.size());
  for (const auto& [name, tensor] : own) {
    EXPECT_EQ(offered.offers.at(name).dtype, tensor.scalar_type()) << name;
    EXPECT_EQ(offered.offers.at(name).sizes, tensor.sizes().vec()) << name;
  }
}

TEST(Offers, DifferWhereABitDiffers) {
  const auto content = [](const at::Tensor& tensor) {
    return StateExchange::decode(StateExchange::encode({{"x", tensor}}, "")).offers.at("x").content;
  };
  const at::Tensor zeros = at::full({5}, 0.0), negative = zeros.clone();
  negative[4].neg_();
  EXPECT_EQ(content(zeros), content(zeros.clone()));
  EXPECT_NE(content(zeros), content(negative)) << "0.0 and -0.0";
  const at::Tensor nans = at::full({5}, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(content(nans), content(nans.clone()));
}

TEST(StateExchange, TellsEveryRankWhoHasWhat) {
  run_replicas(3, 2, [](const Group& pipeline, const Group& replicas) {
    State own;
    if (replicas->rank() == 0 && pipeline->rank() != 1) own["both"] = at::ones({2, 3});
    if (replicas->rank() == 0 && pipeline->rank() == 1) own["middle"] = at::ones({4}, at::kLong);
    if (replicas->rank() == 1) own["does not count"] = at::ones({1});
    const StateExchange exchange(own, "", pipeline, replicas);
    EXPECT_EQ(exchange.error(), "");
    ASSERT_EQ(exchange.offers().size(), 2U);
    EXPECT_EQ(exchange.offers().at("both").ranks, (std::vector<int>{0, 2}));
    EXPECT_EQ(exchange.offers().at("middle").ranks, std::vector<int>{1});
    EXPECT_EQ(exchange.offers().at("middle").sizes, std::vector<int64_t>{4});
    EXPECT_EQ(exchange.offers().at("middle").dtype, at::kLong);
  });
}

TEST(StateExchange, WhatOneRankCannotOfferEveryRankIsTold) {
  run_replicas(3, 2, [](const Group& pipeline, const Group& replicas) {
    const std::string own = pipeline->rank() == 0 ? "" : "no file on rank " + std::to_string(pipeline->rank());
    EXPECT_EQ(StateExchange({}, own, pipeline, replicas).error(), "no file on rank 1") << "the first that came";
  });
}

TEST(StateExchange, OffersThatDifferNameTheTensorAndBothRanks) {
  const std::array<at::Tensor, 3> others{at::full({2, 3}, 2.0), at::ones({3, 2}), at::ones({2, 3}, at::kInt)};
  for (const at::Tensor& other : others) {
    run_replicas(3, 2, [&](const Group& pipeline, const Group& replicas) {
      const State own{{"same", at::ones({1})}, {"weight", pipeline->rank() == 2 ? other : at::ones({2, 3})}};
      const std::string text = StateExchange(own, "", pipeline, replicas).error();
      EXPECT_TRUE(contains(text, "got another 'weight' on pipeline rank 2 than on 0. Read the same save on every rank."))
          << text;
    });
  }
}

TEST(StateExchange, DeliversToTheRanksOfTheHomeInEveryReplica) {
  run_replicas(3, 2, [](const Group& pipeline, const Group& replicas) {
    const at::Tensor weight = at::arange(6, at::kFloat).reshape({2, 3});
    State own;
    if (replicas->rank() == 0 && pipeline->rank() == 1) own["weight"] = weight;
    StateExchange exchange(own, "", pipeline, replicas);
    for (const std::vector<int>& home : std::vector<std::vector<int>>{{0}, {1}, {0, 2}, {0, 1, 2}}) {
      const at::Tensor came = exchange.deliver("weight", home);
      const partitioner::TensorHome ranks(home);
      expect_bit_equal(came, ranks.is_on(pipeline->rank()) ? weight : at::Tensor(),
                       "home from rank " + std::to_string(home[0]));
    }
  });
}

TEST(StateExchange, WhoOffersATensorGetsItsOwn) {
  run_replicas(2, 1, [](const Group& pipeline, const Group& replicas) {
    const at::Tensor weight = at::ones({2});
    StateExchange exchange({{"weight", weight}}, "", pipeline, replicas);
    EXPECT_TRUE(exchange.deliver("weight", {{0, 1}}).is_alias_of(weight));
  });
}

TEST(StateExchange, ReplicasGetWhatTheFirstHasInThePlaceOfTheirOwn) {
  run_replicas(1, 3, [](const Group& pipeline, const Group& replicas) {
    StateExchange exchange({{"weight", at::full({2}, 1.0 * replicas->rank())}}, "", pipeline, replicas);
    EXPECT_EQ(exchange.error(), "");
    expect_bit_equal(exchange.deliver("weight", {{0}}), at::full({2}, 0.0), "weight");
  });
}

TEST(StateExchange, DeliveryThatFailsLeavesItsBufferToTheTransport) {
  const auto run = [](const Group& pipeline, const Group& replicas) {
    StateExchange exchange({{"weight", at::ones({1000})}}, "", pipeline, replicas);
    if (replicas->rank() == 0) throw std::runtime_error("gone");
    const examples::TensorMemory memory;
    EXPECT_THROW(exchange.deliver("weight", {{0}}), CommError);
    EXPECT_EQ(memory.current_bytes(), 4000) << "the tensor that was to be filled";
  };
  EXPECT_THROW(run_replicas(1, 2, run), std::runtime_error);
}

TEST(StateExchange, TensorsInAnotherOrderOfDimensionsAndWithoutElementsArrive) {
  run_replicas(2, 2, [](const Group& pipeline, const Group& replicas) {
    const at::Tensor transposed = at::arange(6, at::kFloat).reshape({2, 3}).t();
    State own;
    if (pipeline->rank() == 0)
      own = {{"transposed", transposed.clone().requires_grad_()},
             {"empty", at::empty({0, 3})},
             {"half", at::ones({}, at::kHalf)}};
    StateExchange exchange(own, "", pipeline, replicas);
    const partitioner::TensorHome home = partitioner::TensorHome::on_all(2);
    for (const auto& [name, want] :
         State{{"transposed", transposed}, {"empty", at::empty({0, 3})}, {"half", at::ones({}, at::kHalf)}}) {
      const at::Tensor came = exchange.deliver(name, home);
      expect_bit_equal(came, want, name);
      EXPECT_TRUE(came.is_contiguous() && !came.requires_grad()) << name;
    }
  });
}

}  // namespace
}  // namespace smp::runtime
