// What a training loop does between and around steps, against the same loop without smp.
#include <mutex>
#include <set>

#include "smp/engine/calls/job.h"
#include "tests/support/loopback_world.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::eager_step;
using tests::expect_as_in_a_loop;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

class Steps : public testing::TestWithParam<int> {
 protected:
  /// Six steps; `turn` moves a knob of the module before each.
  static void expect_followed(const std::function<void(SmallNet&, int step)>& turn) {
    expect_as_in_a_loop<SmallNet>(
        {.ranks = GetParam(), .steps = 6, .config = {.microbatches = 2}, .optimizes = true, .before_step = turn},
        tests::train_once);
  }
};

TEST_P(Steps, FollowATemperatureLoweredAndRaised) {
  expect_followed([](SmallNet& net, int step) { net.temperature = 2.0 - 0.25 * (step % 4); });
}

TEST_P(Steps, FollowAFlagFlippedThereAndBack) {
  expect_followed([](SmallNet& net, int step) { net.squashes = step % 2 == 1; });
}

TEST_P(Steps, FollowBothAtOnce) {
  expect_followed([](SmallNet& net, int step) {
    net.squashes = step == 2 || step == 5;
    net.temperature = 1.0 + 0.5 * (step % 3);
  });
}

/// Its masks are no part of the module for smp.
struct MaskedNet : SmallNet {
  at::Tensor first_mask = torch::ones({8}), last_mask = torch::ones({4});
};

// The mask stands at the first stage or at the last, so that each rank of two needs its new value once.
void expect_mask_followed(int ranks, void (*change)(at::Tensor& mask, int step)) {
  for (const bool at_the_end : {false, true}) {
    const auto turn = [&](MaskedNet& net, int step) { change(at_the_end ? net.last_mask : net.first_mask, step); };
    expect_as_in_a_loop<MaskedNet>(
        {.ranks = ranks, .steps = 5, .config = {.microbatches = 2}, .before_step = turn},
        [](const tests::BodyRun<MaskedNet>& run) {
          return run.trained((run.forward(run.data * run.net.first_mask) * run.net.last_mask).square().mean());
        });
  }
}

TEST_P(Steps, FollowAConstantChangedInPlace) {
  expect_mask_followed(GetParam(), [](at::Tensor& mask, int step) { mask.fill_(step % 3 == 2 ? 1.0 : 0.5 + step); });
}

TEST_P(Steps, FollowAConstantReplacedByAnother) {
  expect_mask_followed(GetParam(), [](at::Tensor& mask, int step) { mask = torch::full_like(mask, 1.0 + step % 2); });
}

TEST_P(Steps, FollowAConstantWrittenThroughItsPointer) {
  expect_mask_followed(GetParam(),
                       [](at::Tensor& mask, int step) { mask.data_ptr<float>()[0] = 1.0F + static_cast<float>(step % 2); });
}

TEST_P(Steps, TwoStepFunctionsKeepTheirOwnConstants) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    const at::Tensor data = rows(4, 8, 1);
    const auto step_with = [&](const at::Tensor& weights) {
      return smp::step([&model, weights](at::Tensor x) { return model(x) * weights; });
    };
    const at::Tensor one = torch::full({4}, 1.0), two = torch::full({4}, 2.0);
    auto first = step_with(one), second = step_with(two);
    for (int round = 0; round < 2; ++round) {
      std::vector<at::Tensor> want;
      for (const auto& part : support::split_batch({data}, 2)) want.push_back(twin->forward(part[0]).detach());
      expect_bit_equal(first(data).outputs(), want, "weights of one");
      expect_bit_equal(second(data).outputs(), {want[0] * 2, want[1] * 2}, "weights of two");
    }
  });
}

TEST_P(Steps, TrainEvaluateAndTakeAShorterBatch) {
  run_smp_ranks(GetParam(), {.microbatches = 2, .seed = 5}, [] {
    const auto net = make_net(), twin = make_net();
    net->dropout->options.p(0.5);
    twin->dropout->options.p(0.5);
    Model model(net);
    auto train = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    auto evaluate = smp::step([&](at::Tensor data) { return model(data); });
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    train(rows(8, 8, 1));
    optimizer.step();
    const StateDict state = model.state_dict();
    {
      const at::NoGradGuard no_grad;
      for (auto& item : twin->named_parameters()) item.value().copy_(state.at(item.key()));
      model.eval();
      twin->eval();
      for (const int64_t size : {8, 2, 6, 8}) {
        const at::Tensor data = rows(size, 8, 2);
        std::vector<at::Tensor> want;
        for (const auto& part : support::split_batch({data}, 2)) want.push_back(twin->forward(part[0]));
        expect_bit_equal(evaluate(data).outputs(), want, "evaluation of " + std::to_string(size));
      }
    }
    model.train();
    model.zero_grad();
    for (const auto& [name, tensor] : model.local_named_parameters()) EXPECT_FALSE(tensor.grad().defined()) << name;
    train(rows(4, 8, 3));
    for (const auto& [name, tensor] : model.local_named_parameters()) EXPECT_TRUE(tensor.grad().defined()) << name;
  });
}

TEST_P(Steps, TrainOnAShorterLastBatchAndAccumulateGradients) {
  const auto batch = [](int step) { return rows(step == 2 ? 2 : 8, 8, step); };
  expect_as_in_a_loop<SmallNet>({.ranks = GetParam(), .steps = 3, .config = {.microbatches = 2}, .batch = batch},
                                tests::train_once);
}

TEST_P(Steps, RunOneBodyForAllMicrobatchesThatAreAlike) {
  std::vector<at::Tensor> losses, gradients;
  std::vector<int> bodies;
  for (const Bodies kind : {Bodies::kEach, Bodies::kAlike}) {
    std::mutex mutex;
    run_smp_ranks(GetParam(), {.microbatches = 4, .bodies = kind}, [&] {
      const auto net = make_net();
      Model model(net);
      int num_bodies = 0;
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = model(data).square().mean();
        model.backward(loss);
        return std::make_tuple(loss, ++num_bodies);
      });
      const auto [first, numbers] = step(rows(8, 8, 1));
      const auto [second, again] = step(rows(12, 8, 2));
      if (pp_rank() != 0) return;
      const std::lock_guard<std::mutex> lock(mutex);
      losses.push_back(torch::cat({first.stack(), second.stack()}));
      bodies.push_back(num_bodies);
      EXPECT_EQ(numbers.size(), 4U);
      EXPECT_EQ(numbers.back() == numbers.front(), kind == Bodies::kAlike);
      EXPECT_EQ(again.front(), kind == Bodies::kAlike ? 2 : 5);
    });
  }
  EXPECT_EQ(bodies, (std::vector<int>{8, 2}));
  expect_bit_equal(losses[1], losses[0], "losses");
}

TEST_P(Steps, RunEachBodyThatReadsItsArguments) {
  std::vector<at::Tensor> losses;
  for (const Bodies kind : {Bodies::kEach, Bodies::kAlike}) {
    std::mutex mutex;
    run_smp_ranks(GetParam(), {.microbatches = 4, .bodies = kind}, [&] {
      const auto net = make_net();
      Model model(net);
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = (model(data) / data.abs().max().item<double>()).square().mean();
        model.backward(loss);
        return loss;
      });
      at::Tensor first = step(rows(8, 8, 1)).stack(), second = step(rows(8, 8, 2)).stack();
      if (pp_rank() != 0) return;
      const std::lock_guard<std::mutex> lock(mutex);
      losses.push_back(torch::cat({first, second}));
    });
  }
  expect_bit_equal(losses[1], losses[0], "losses");
}

TEST_P(Steps, IndivisibleBatchIsRefusedOnEveryRank) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    auto step = tests::training_step(model);
    for (int round = 0; round < 2; ++round) {
      EXPECT_THROW(step(rows(7, 8, 1), rows(7, 4, 2)), c10::ValueError);
      const std::string message = message_of([&] { step(rows(8, 8, 1), rows(7, 4, 2)); });
      EXPECT_TRUE(contains(message, "step argument 1") && contains(message, "microbatches=2, got 7")) << message;
      expect_twins(model, *twin, "after the refusal");
      expect_bit_equal(step(rows(4, 8, 1), rows(4, 4, 2)).outputs(), eager_step(*twin, rows(4, 8, 1), rows(4, 4, 2), 2),
                       "loss");
      expect_twins(model, *twin, "after the step");
    }
  });
}

TEST_P(Steps, PartitionIndexOutOfRangeIsRefused) {
  run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net();
    EXPECT_THROW(PartitionGuard(7), c10::ValueError);
    EXPECT_THROW(PartitionGuard(-1), c10::ValueError);
    EXPECT_THROW(PartitionGuard{pp_size()}, c10::ValueError);
    EXPECT_THROW(set_partition(*net->first, 7), c10::ValueError);
    EXPECT_NO_THROW(PartitionGuard(pp_size() - 1));
  });
}

TEST_P(Steps, LbfgsIsRefused) {
  run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net();
    Model model(net);
    EXPECT_THROW(DistributedOptimizer(torch::optim::LBFGS(net->parameters()), model), c10::ValueError);
    EXPECT_NO_THROW(DistributedOptimizer(torch::optim::Adam(net->parameters()), model));
  });
}

TEST_P(Steps, ReleasedParametersNameTheirOwner) {
  run_smp_ranks(GetParam(), {}, [] {
    const auto net = make_net();
    Model model(net);
    auto step = tests::training_step(model);
    step(rows(4, 8, 1), rows(4, 4, 2));
    std::set<std::string> local;
    for (const auto& [name, tensor] : model.local_named_parameters()) local.insert(name);
    EXPECT_EQ(local.size() == 8, pp_size() == 1);
    for (const auto& item : net->named_parameters()) {
      const std::string message = message_of([&] { item.value().sum(); });
      if (local.contains(item.key())) {
        EXPECT_EQ(message, "") << item.key();
      } else {
        EXPECT_TRUE(contains(message, "'" + item.key() + "'") && contains(message, "live on pipeline rank")) << message;
      }
    }
    EXPECT_THROW(set_partition(*net->first, 0), c10::Error);
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Steps, testing::Values(1, 2, 3));

TEST(Init, ComesBeforeEverything) {
  auto net = make_net();
  auto early = smp::step([](at::Tensor data) { return data; });
  for (const std::string& message : {message_of([&] { early(rows(4, 8, 1)); }), message_of([&] { Model model(net); }),
                                     message_of([] { PartitionGuard guard(0); }), message_of([] { rank(); })}) {
    EXPECT_TRUE(contains(message, "expected smp::init() to have been called")) << message;
  }
}

TEST(Init, StepWithoutAModelIsRefused) {
  run_smp_ranks(2, {}, [] {
    auto step = smp::step([](at::Tensor data) { return data; });
    const std::string message = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(message, "expected a DistributedModel")) << message;
  });
}

// The message of each of two ranks.
void expect_refused_on_every_rank(const std::string& expected, const std::function<Config(int rank)>& config_of,
                                  const std::function<std::string(int rank)>& software_of) {
  std::mutex mutex;
  std::multiset<std::string> messages;
  tests::run_ranks(2, [&](runtime::Transport& transport) {
    const std::shared_ptr<runtime::Transport> borrowed(std::shared_ptr<void>(), &transport);
    const int rank = transport.rank();
    const runtime::Launch launch{.rank = rank, .size = transport.size()};
    const std::string message =
        message_of([&] { engine::make_context(config_of(rank), launch, borrowed, software_of(rank)); });
    const std::lock_guard<std::mutex> lock(mutex);
    messages.insert(message);
  });
  EXPECT_EQ(messages.count(*messages.begin()), 2U);
  EXPECT_TRUE(contains(*messages.begin(), expected)) << *messages.begin();
}

TEST(Init, DifferentConfigurationsAreRefusedOnEveryRank) {
  expect_refused_on_every_rank(
      "rank 0 and rank 1: microbatches",
      [](int rank) { return Config{.microbatches = 2 + rank, .log_level = LogLevel::kOff}; },
      [](int) { return engine::versions(); });
}

TEST(Init, DifferentSoftwareIsRefusedOnEveryRank) {
  expect_refused_on_every_rank(
      "expected the same software on all ranks, got: rank 0 has smp 0; rank 1 has smp 1. Install the same",
      [](int) { return Config{.microbatches = 2, .log_level = LogLevel::kOff}; },
      [](int rank) { return "smp " + std::to_string(rank); });
}

}  // namespace
}  // namespace smp
