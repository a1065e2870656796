// What is left to smp: microbatches=auto and parallelism=auto.
#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;

Config auto_config(int64_t microbatches) {
  return {.parallelism = Parallelism::kAuto, .microbatches = microbatches, .log_level = LogLevel::kOff};
}

class MicrobatchesAuto : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, MicrobatchesAuto, ::testing::Values(1, 2, 3));

TEST_P(MicrobatchesAuto, TrainLikeTheSameNumberGivenByHand) {
  run_smp_ranks(GetParam(), {.microbatches = kAutoMicrobatches, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net(), twin = make_net();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < 3; ++s) {
      const at::Tensor data = rows(12, 8, s);
      const StepOutput losses = step(data);
      ASSERT_EQ(12 % losses.size(), 0);
      for (int64_t m = 0; m < losses.size(); ++m) {
        const at::Tensor want = twin->forward(data.chunk(losses.size())[m]).square().mean();
        (want / losses.size()).backward();
        expect_bit_equal(losses[m], want.detach(), "loss " + std::to_string(m));
      }
      expect_twins(model, *twin, "step " + std::to_string(s));
    }
    EXPECT_EQ(config().microbatches, kAutoMicrobatches);
  });
}

TEST_P(MicrobatchesAuto, FitEveryBatch) {
  run_smp_ranks(GetParam(), {.microbatches = kAutoMicrobatches, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    for (const int64_t size : {12, 7, 1, 12}) EXPECT_EQ(step(rows(size, 8, 1)).concat().size(0), size);
  });
}

TEST_P(MicrobatchesAuto, LeaveOutNumbersThatTheBodyRefuses) {
  run_smp_ranks(GetParam(), {.microbatches = kAutoMicrobatches, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      TORCH_CHECK_VALUE(data.size(0) == 3, "rows come in threes");
      return model(data);
    });
    EXPECT_EQ(step(rows(12, 8, 1)).size(), 4);
    const std::string text = support::message_of<c10::ValueError>([&] { step(rows(8, 8, 1)); });
    EXPECT_TRUE(support::contains(text, "rows come in threes")) << text;
    EXPECT_EQ(step(rows(6, 8, 1)).size(), 2);
  });
}

TEST_P(MicrobatchesAuto, BodiesMayRead) {
  run_smp_ranks(GetParam(), {.microbatches = kAutoMicrobatches, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    int num_read = 0;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      if (loss.item<float>() > 0) ++num_read;
      model.backward(loss);
      return loss;
    });
    const StepOutput losses = step(rows(8, 8, 1));
    if (pp_rank() == 0) {
      EXPECT_EQ(num_read, losses.size());
    }
  });
}

// The body runs for its graphs before it runs for the step, which is then refused.
TEST(MicrobatchesAuto, TrialsLeaveGradientsAsTheyAre) {
  run_smp_ranks(2, {.microbatches = kAutoMicrobatches, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    bool clears = false;
    auto step = smp::step([&](at::Tensor data) {
      for (at::Tensor parameter : net->parameters()) {
        if (clears) parameter.mutable_grad().reset();
      }
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    step(rows(12, 8, 1));
    std::vector<at::Tensor> gradients;
    for (const auto& [name, parameter] : model.local_named_parameters()) gradients.push_back(parameter.grad().clone());
    clears = true;
    const std::string text = support::message_of<c10::ValueError>([&] { step(rows(16, 8, 1)); });
    EXPECT_TRUE(support::contains(text, "expected a body that leaves gradients as they are")) << text;
    size_t next = 0;
    for (const auto& [name, parameter] : model.local_named_parameters()) {
      expect_bit_equal(parameter.grad(), gradients[next++], name);
    }
  });
}

TEST(MicrobatchesAuto, NeedAnArgumentToCut) {
  run_smp_ranks(2, {.microbatches = kAutoMicrobatches, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    const at::Tensor data = rows(4, 8, 1);
    auto step = smp::step([&] { return model(data); });
    const std::string text = support::message_of<c10::ValueError>([&] { step(); });
    EXPECT_TRUE(support::contains(text, "microbatches=auto")) << text;
  });
}

// Slow messages, or cheap ones, make one layout or the other the better one; here only that any is right.
class AutoParallelism : public ::testing::TestWithParam<std::tuple<int, int64_t>> {};
INSTANTIATE_TEST_SUITE_P(RanksAndMicrobatches, AutoParallelism,
                         ::testing::Combine(::testing::Values(1, 2, 4, 6), ::testing::Values(kAutoMicrobatches, 2)));

TEST_P(AutoParallelism, GivesTheResultsOfTheWholeBatchOnEveryRank) {
  const auto [ranks, microbatches] = GetParam();
  run_smp_ranks(ranks, auto_config(microbatches), [] {
    const auto net = make_net(), twin = make_net();
    net->to(at::kDouble), twin->to(at::kDouble);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return std::make_tuple(loss, data.size(0));
    });
    for (int s = 0; s < 3; ++s) {
      const at::Tensor data = rows(24, 8, s).to(at::kDouble);
      const auto [losses, sizes] = step(data);
      ASSERT_EQ(losses.size() % dp_size(), 0);
      ASSERT_EQ(sizes.size(), static_cast<size_t>(losses.size()));
      int64_t first = 0;
      for (int64_t m = 0; m < losses.size(); ++m) {
        const at::Tensor want = twin->forward(data.narrow(0, first, sizes[m])).square().mean();
        (want / losses.size()).backward();
        first += sizes[m];
        EXPECT_NEAR(losses[m].item<double>(), want.item<double>(), 1e-12);
      }
      EXPECT_EQ(first, 24);
      for (const auto& named : twin->named_parameters()) {
        const at::Tensor own = net->named_parameters()[named.key()].grad();
        if (own.defined()) {
          EXPECT_TRUE(at::allclose(own.cpu(), named.value().grad(), 1e-10, 1e-12)) << named.key();
        }
      }
    }
    EXPECT_EQ(pp_size() * dp_size(), size());
  });
}

// Some layouts, and with them numbers of microbatches, are compared only where ranks could be replicas instead.
TEST(AutoParallelismOnDevices, CutsTheSharesOfAllReplicasAlike) {
  Config config = auto_config(kAutoMicrobatches);
  config.planned_device = "A100";
  run_smp_ranks(6, config, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return std::make_tuple(loss, data.size(0));
    });
    const auto [losses, sizes] = step(rows(24, 8, 1));
    EXPECT_GT(pp_size(), 1);
    EXPECT_GT(dp_size(), 1);
    EXPECT_EQ(std::set(sizes.begin(), sizes.end()).size(), 1U);
  });
}

auto squares_step(DistributedModel<tests::SmallNet>& model) {
  return smp::step([&](at::Tensor data) {
    const at::Tensor loss = model(data).square().mean();
    model.backward(loss);
    return loss;
  });
}

// The groups that the load came through end with the step that decides the layout.
TEST_P(AutoParallelism, GoesOnFromALoadedState) {
  const auto [ranks, microbatches] = GetParam();
  StateDict state;
  OptimizerState averages;
  std::map<std::string, at::Tensor> want;
  run_smp_ranks(1, {.microbatches = 2}, [&] {
    const auto net = make_net(at::kDouble);
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 0.01), model);
    auto step = squares_step(model);
    for (int s = 0; s < 3; ++s) {
      state = model.state_dict();
      averages = optimizer.state_dict();
      optimizer.zero_grad();
      step(rows(24, 8, s, at::kDouble));
      optimizer.step();
    }
    for (const auto& [name, parameter] : model.local_named_parameters()) want[name] = parameter.detach().cpu().clone();
  });
  run_smp_ranks(ranks, auto_config(microbatches), [&] {
    const auto net = make_net(at::kDouble);
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 0.01), model);
    auto step = squares_step(model);
    model.load_state_dict(state);
    optimizer.load_state_dict(averages);
    step(rows(24, 8, 2, at::kDouble));
    optimizer.step();
    for (const auto& [name, parameter] : model.local_named_parameters()) {
      EXPECT_TRUE(at::allclose(parameter.cpu(), want.at(name), 1e-10, 1e-12)) << name;
    }
  });
}

TEST(AutoParallelism, RefusesALoadIntoADelayedModelBeforeTheFirstStep) {
  run_smp_ranks(2, auto_config(2), [] {
    const StateDict state = DistributedModel(make_net()).state_dict();
    std::shared_ptr<tests::SmallNet> net;
    {
      const DelayParamInitialization delay;
      net = std::make_shared<tests::SmallNet>();
    }
    DistributedModel model(net);
    const std::string text = support::message_of<c10::ValueError>([&] { model.load_state_dict(state); });
    EXPECT_TRUE(support::contains(text, "with parallelism=auto the first step decides")) << text;
    auto step = squares_step(model);
    step(rows(24, 8, 1));
    model.load_state_dict(state);
  });
}

TEST(AutoParallelism, IsDecidedByTheFirstStep) {
  run_smp_ranks(2, auto_config(2), [] {
    for (const auto& ask : {dp_rank, dp_size, pp_rank, pp_size, mp_rank}) {
      const std::string text = support::message_of<c10::Error>([&] { ask(); });
      EXPECT_TRUE(support::contains(text, "expected a call after the first step")) << text;
    }
    EXPECT_THROW(get_dp_group(), c10::Error);
    EXPECT_THROW(allgather(1, CommGroup::DP_GROUP), c10::Error);
    EXPECT_THROW(barrier(CommGroup::PP_GROUP), c10::Error);
    EXPECT_EQ(size(), 2);
    barrier(CommGroup::WORLD);
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    // Refused: nothing is decided.
    EXPECT_THROW(step(rows(7, 8, 1)), c10::ValueError);
    EXPECT_THROW(dp_rank(), c10::Error);
    step(rows(8, 8, 1));
    EXPECT_EQ(dp_size() * pp_size(), 2);
    const std::string text = support::message_of<c10::ValueError>([&] { step(rows(7, 8, 1)); });
    EXPECT_TRUE(support::contains(text, "divisible by")) << text;
  });
}

TEST(AutoParallelism, KeepsAModelInPiecesThatDoesNotFitOnOneRank) {
  Config config = auto_config(kAutoMicrobatches);
  config.memory_limit_mb = 40;  // the parameters and gradients alone take 64
  run_smp_ranks(2, config, [] {
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(2048, 2048), torch::nn::ReLU(), torch::nn::Linear(2048, 2048));
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    step(rows(4, 2048, 1));
    EXPECT_EQ(pp_size(), 2);
    EXPECT_EQ(dp_size(), 1);
  });
}

TEST(AutoParallelism, TakesReplicasOfASmallModelWithALargeBatch) {
  run_smp_ranks(2, auto_config(kAutoMicrobatches), [] {
    torch::manual_seed(1);
    // One operator has nearly all the work: no cut balances that.
    torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2));
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    step(rows(8192, 64, 1));
    EXPECT_EQ(dp_size(), 2);
  });
}

}  // namespace
}  // namespace smp
