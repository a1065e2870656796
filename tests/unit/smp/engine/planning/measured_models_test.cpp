// cost=measured of models whose parameters are elsewhere, or not made yet.
#include <gtest/gtest.h>

#include <algorithm>

#include "smp/engine/rank/rank_state.h"
#include "smp/smp.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/seeded_net.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

const Config kMeasured{.microbatches = 2, .cost = CostSource::kMeasured, .cost_cache = "off", .log_level = LogLevel::kOff};

bool knows_all_operators_of(size_t model) {
  const engine::RankState& rank = engine::rank_state("test");
  const partitioner::Graph& graph = rank.models.all()[model]->first_program->graph;
  return rank.programs.options(graph).machine.measured->covers(graph);
}

TEST(MeasuredCosts, MakeNoParameterOfAnotherRank) {
  run_smp_ranks(2, kMeasured, [] {
    const auto twin = tests::seeded<tests::SmallNet>(false), net = tests::seeded<tests::SmallNet>(true);
    DistributedModel model(net);
    auto step = tests::training_step(model);
    const at::Tensor data = rows(8, 8, 1), target = rows(8, 4, 2);
    step(data, target);
    tests::eager_step(*twin, data, target, 2);
    tests::expect_twins(model, *twin, "with measured costs");
    EXPECT_TRUE(knows_all_operators_of(0));
    const auto parameters = net->parameters();
    EXPECT_TRUE(std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& parameter) {
      return parameter.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
    }));
  });
}

TEST(MeasuredCosts, AreTakenOfAModelThatComesWhenAnotherIsPlaced) {
  run_smp_ranks(2, kMeasured, [] {
    DistributedModel first(make_net(), {.name = "first"}), second(make_net(), {.name = "second"});
    auto step_of_first = smp::step([&](at::Tensor data) { first.backward(first(data).square().mean()); });
    auto step_of_both = smp::step([&](at::Tensor data) { second.backward((first(data) - second(data)).square().mean()); });
    step_of_first(rows(8, 8, 0));
    step_of_both(rows(8, 8, 1));
    for (const size_t model : {0, 1}) EXPECT_TRUE(knows_all_operators_of(model));
    EXPECT_GT(second.predicted_step_s(), 0);
  });
}

}  // namespace
}  // namespace smp
