// cost=measured while a job runs: ranks that are not equally fast, and times taken anew.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "smp/detail/conductor.h"
#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

Config measured() {
  return {.microbatches = 2, .cost = CostSource::kMeasured, .cost_cache = "off", .log_level = LogLevel::kOff};
}

const detail::Program& program() { return *detail::conductor("test").models().all().front()->first_program; }

TEST(Slowness, IsKnownOfEachRank) {
  Config config = measured();
  config.pipeline_parallel_degree = 2;
  run_smp_ranks(4, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    step(rows(8, 8, 0));
    const detail::Programs& programs = detail::conductor("test").programs();
    const std::vector<double>& by_rank = programs.options(program().graph).measured->slowness();
    ASSERT_EQ(by_rank.size(), 4u);
    EXPECT_EQ(by_rank[0], 1);
    for (const double slowness : by_rank) EXPECT_GT(slowness, 0);
    EXPECT_EQ(programs.slowness(2), (std::vector<std::vector<double>>{{by_rank[0], by_rank[1]}, {by_rank[2], by_rank[3]}}));
    EXPECT_EQ(programs.slowness(1).size(), 4u);
  });
}

TEST(MeasureAgain, PredictsAnewAndLeavesThePlanAndTheTrainingAsTheyAre) {
  for (const int pipeline_ranks : {1, 2}) {
    Config config = measured();
    config.pipeline_parallel_degree = pipeline_ranks;
    std::vector<std::vector<at::Tensor>> gradients(2);
    for (const bool again : {false, true}) {
      run_smp_ranks(2, config, [&] {
        DistributedModel model(make_net());
        auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
        step(rows(8, 8, 0));
        const auto costs = [] {
          return detail::conductor("test").programs().options(program().graph).measured->to_json();
        };
        const std::string known = costs(), planned = model.plan_json();
        const double predicted_s = model.predicted_step_s();
        EXPECT_EQ(predicted_s, program().plan.predicted_step_us * 1e-6);
        if (again) model.measure_again();
        step(rows(8, 8, 1));
        EXPECT_EQ(costs() != known, again);
        EXPECT_EQ(model.predicted_step_s() != predicted_s, again);
        EXPECT_EQ(model.plan_json(), planned);
        const std::vector<double> predictions = smp::allgather(model.predicted_step_s(), smp::WORLD);
        EXPECT_EQ(predictions[0], predictions[1]);
        EXPECT_GT(predictions[0], 0);
        const std::string measured_once = costs();
        step(rows(8, 8, 2));
        EXPECT_EQ(costs(), measured_once);
        if (smp::rank() != 0) return;
        for (const at::Tensor& parameter : model.local_parameters()) gradients[again].push_back(parameter.grad().clone());
      });
    }
    ASSERT_FALSE(gradients[0].empty());
    support::expect_bit_equal(gradients[1], gradients[0], "gradients");
  }
}

TEST(MeasureAgain, WantsMeasuredCostsAndNoBodyInProgress) {
  Config config = measured();
  run_smp_ranks(1, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      model.measure_again();
      model.backward(model(data).square().mean());
    });
    EXPECT_THROW(step(rows(8, 8, 0)), c10::ValueError);
  });
  config.cost = CostSource::kPredicted;
  run_smp_ranks(1, config, [] {
    DistributedModel model(make_net());
    EXPECT_THROW(model.measure_again(), c10::ValueError);
  });
}

}  // namespace
}  // namespace smp
