// cost=measured while a job runs: ranks that are not equally fast, and times taken anew.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "smp/engine/rank_state.h"
#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/seeded_net.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

Config measured() {
  return {.microbatches = 2, .cost = CostSource::kMeasured, .cost_cache = "off", .log_level = LogLevel::kOff};
}

const engine::Program& program() { return *engine::rank_state("test").models.all().front()->first_program; }

const engine::Programs& programs() { return engine::rank_state("test").programs; }

std::string costs() { return programs().options(program().graph).measured->to_json(); }

auto training_of(DistributedModel<tests::SmallNet>& model) {
  return smp::step([&](at::Tensor data) {
    const at::Tensor loss = model(data).square().mean();
    model.backward(loss);
    return loss;
  });
}

Config replicated() {
  Config config = measured();
  config.pipeline_parallel_degree = 1;
  return config;
}

TEST(Slowness, IsKnownOfEachRank) {
  Config config = measured();
  config.pipeline_parallel_degree = 2;
  run_smp_ranks(4, config, [] {
    DistributedModel model(make_net());
    training_of(model)(rows(8, 8, 0));
    const std::vector<double>& by_rank = programs().options(program().graph).measured->slowness();
    ASSERT_EQ(by_rank.size(), 4u);
    EXPECT_EQ(by_rank[0], 1);
    for (size_t r = 1; r < 4; ++r) EXPECT_NE(by_rank[r], 1) << "two ranks never take the same time to the last digit";
    EXPECT_EQ(programs().slowness(2), (std::vector<std::vector<double>>{{by_rank[0], by_rank[1]}, {by_rank[2], by_rank[3]}}));
    EXPECT_EQ(programs().slowness(1).size(), 4u);
  });
}

TEST(PredictAgain, IsThePredictionOfThePlanAsLongAsNothingElseWasMeasured) {
  for (const int pipeline_ranks : {1, 2}) {
    Config config = measured();
    config.pipeline_parallel_degree = pipeline_ranks;
    run_smp_ranks(2, config, [] {
      DistributedModel model(make_net());
      training_of(model)(rows(8, 8, 0));
      EXPECT_DOUBLE_EQ(programs().predict_again(program(), 2), program().plan.predicted_step_us);
    });
  }
}

TEST(MeasureAgain, PredictsAnewAndLeavesTheTrainingAsItIs) {
  for (const int pipeline_ranks : {1, 2}) {
    Config config = measured();
    config.pipeline_parallel_degree = pipeline_ranks;
    std::map<std::string, at::Tensor> gradients[2];  // of all ranks: two jobs may cut the model elsewhere
    std::mutex mutex;
    for (const bool again : {false, true}) {
      run_smp_ranks(2, config, [&] {
        DistributedModel model(make_net());
        auto step = training_of(model);
        step(rows(8, 8, 0));
        const std::string known = costs();
        const double predicted_s = model.predicted_step_s();
        EXPECT_EQ(predicted_s, program().plan.predicted_step_us * 1e-6);
        if (again) model.measure_again();
        step(rows(8, 8, 1));
        EXPECT_EQ(costs() != known, again);
        EXPECT_DOUBLE_EQ(model.predicted_step_s(), programs().predict_again(program(), 2) * 1e-6);
        EXPECT_EQ(model.predicted_step_s() != predicted_s, again);
        const std::vector<double> predictions = smp::allgather(model.predicted_step_s(), smp::WORLD);
        EXPECT_EQ(predictions[0], predictions[1]);
        const std::string measured_once = costs();
        step(rows(8, 8, 2));
        EXPECT_EQ(costs(), measured_once);
        const std::lock_guard lock(mutex);
        if (smp::dp_rank() > 0) return;
        for (const auto& [name, parameter] : model.local_named_parameters()) gradients[again][name] = parameter.grad().clone();
      });
    }
    ASSERT_FALSE(gradients[0].empty());
    ASSERT_EQ(gradients[1].size(), gradients[0].size());
    for (const auto& [name, gradient] : gradients[0]) support::expect_bit_equal(gradients[1].at(name), gradient, name);
  }
}

TEST(MeasureAgain, MeasuresWhatWasPlannedWhateverStepComesNext) {
  run_smp_ranks(2, measured(), [] {
    DistributedModel model(make_net());
    auto step = training_of(model);
    auto evaluation = smp::step([&](at::Tensor data) { return model(data); });
    step(rows(8, 8, 0));
    const auto time_of_first = [] {
      const auto& graph = program().graph;
      return *programs().options(graph).measured->find(graph, graph.nodes.front());
    };
    for (const int64_t batch : {8, 4}) {
      const auto before = time_of_first();
      model.measure_again();
      evaluation(rows(batch, 8, 1));
      EXPECT_NE(time_of_first(), before);
      EXPECT_DOUBLE_EQ(model.predicted_step_s(), programs().predict_again(program(), 2) * 1e-6);
    }
  });
}

TEST(MeasureAgain, LeavesARefusalToTheStep) {
  run_smp_ranks(2, measured(), [] {
    DistributedModel model(make_net());
    auto step = training_of(model);
    step(rows(8, 8, 0));
    const std::string known = costs();
    model.measure_again();
    EXPECT_THROW(step(rows(7, 8, 1)), c10::ValueError);  // 7 rows in 2 microbatches
    EXPECT_NE(costs(), known);
    step(rows(8, 8, 2));
  });
}

TEST(MeasureAgain, WaitsForTheEndOfAJoin) {
  run_smp_ranks(2, replicated(), [] {
    DistributedModel model(make_net());
    auto step = training_of(model);
    step(rows(8, 8, 0));
    const std::string known = costs();
    model.measure_again();
    smp::join([&] {
      EXPECT_THROW(model.measure_again(), c10::ValueError);
      for (int s = 0; s < 2 * smp::dp_rank(); ++s) step(rows(8, 8, s));  // replica 0 has none
    });
    EXPECT_EQ(costs(), known);
    step(rows(8, 8, 1));
    EXPECT_NE(costs(), known);
  });
}

TEST(MeasureAgain, LeavesTheChoiceOfMicrobatchesToAllReplicasAlike) {
  Config config = replicated();
  config.microbatches = kAutoMicrobatches;
  run_smp_ranks(2, config, [] {
    DistributedModel model(make_net());
    auto step = training_of(model);
    for (const int64_t batch : {8, 64, 48}) {
      const std::vector<int64_t> counts = smp::allgather(static_cast<int64_t>(step(rows(batch, 8, 0)).size()), smp::WORLD);
      EXPECT_EQ(counts[0], counts[1]);
      model.measure_again();
    }
  });
}

TEST(MeasureAgain, MayBeAskedForBeforeTheFirstStep) {
  Config config = measured();
  config.parallelism = Parallelism::kAuto;
  run_smp_ranks(2, config, [] {
    DistributedModel model(make_net());
    model.measure_again();
    auto step = training_of(model);
    step(rows(8, 8, 0));
    EXPECT_GT(model.predicted_step_s(), 0);
  });
}

TEST(MeasureAgain, PredictsEachOfSeveralModelsAsItWasPlanned) {
  run_smp_ranks(2, measured(), [] {
    DistributedModel first(make_net(), {.name = "first"}), second(make_net(), {.name = "second"});
    auto step_of_first = training_of(first), step_of_second = training_of(second);
    const auto predicted_s = [&] { return std::vector<double>{first.predicted_step_s(), second.predicted_step_s()}; };
    const auto expect_alike_on_ranks = [&] {
      for (const double own : predicted_s()) {
        const std::vector<double> by_rank = smp::allgather(own, smp::WORLD);
        EXPECT_EQ(by_rank[0], by_rank[1]);
      }
    };
    step_of_first(rows(8, 8, 0));
    std::vector<double> before = predicted_s();
    EXPECT_EQ(before[1], 0) << "not planned yet";
    second.measure_again();
    step_of_second(rows(4, 8, 1));
    EXPECT_NE(predicted_s()[0], before[0]);
    EXPECT_GT(predicted_s()[1], 0);
    expect_alike_on_ranks();

    before = predicted_s();
    first.measure_again();
    step_of_first(rows(8, 8, 2));
    for (const size_t m : {0, 1}) EXPECT_NE(predicted_s()[m], before[m]);
    expect_alike_on_ranks();
    const auto& models = engine::rank_state("test").models.all();
    for (const size_t m : {0, 1}) {
      EXPECT_DOUBLE_EQ(predicted_s()[m], programs().predict_again(*models[m]->first_program, 2) * 1e-6);
    }
  });
}

std::atomic<int> num_opaque_calls = 0;

TEST(MeasureAgain, RunsNoCodeOfOthers) {
  run_smp_ranks(2, measured(), [] {
    DistributedModel model(make_net());
    const auto twice = [](at::Tensor t) {
      ++num_opaque_calls;
      return t * 2;
    };
    auto step = smp::step([&](at::Tensor data) { model.backward(smp::opaque(twice, model(data)).square().mean()); });
    const auto calls_of_a_step = [&](uint64_t seed) {
      smp::barrier();
      const int before = num_opaque_calls;
      smp::barrier();
      step(rows(8, 8, seed));
      smp::barrier();
      return num_opaque_calls - before;
    };
    step(rows(8, 8, 0));
    step(rows(8, 8, 1));
    const int calls = calls_of_a_step(2);
    EXPECT_GT(calls, 0);
    model.measure_again();
    EXPECT_EQ(calls_of_a_step(3), calls);
    EXPECT_GT(model.predicted_step_s(), 0);
  });
}

TEST(MeasureAgain, MakesNoParameterOfAnotherRank) {
  run_smp_ranks(2, measured(), [] {
    const auto twin = tests::seeded<tests::SmallNet>(false);
    const auto net = tests::seeded<tests::SmallNet>(true);
    DistributedModel model(net);
    auto step = tests::training_step(model);
    const auto num_without_memory = [&] {
      const auto parameters = net->parameters();
      return std::count_if(parameters.begin(), parameters.end(), [](const at::Tensor& parameter) {
        return parameter.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() == nullptr;
      });
    };
    const at::Tensor data = rows(8, 8, 1), target = rows(8, 4, 2);
    step(data, target);
    const auto elsewhere = num_without_memory();
    EXPECT_GT(elsewhere, 0);
    const std::string known = costs();
    model.measure_again();
    step(data, target);
    EXPECT_NE(costs(), known);
    EXPECT_EQ(num_without_memory(), elsewhere);
    for (int s = 0; s < 2; ++s) tests::eager_step(*twin, data, target, 2);
    tests::expect_twins(model, *twin, "after measuring again");
  });
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
