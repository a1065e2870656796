// Calls that belong around a step are refused within its body, on every rank, and leave the job as it was.
#include <gtest/gtest.h>

#include <functional>
#include <optional>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;
using Optimizer = DistributedOptimizer<torch::optim::SGD>;

struct Call {
  std::string name, refused_as;
  std::function<void(Model&, Optimizer&)> make;
};

class InBody : public testing::TestWithParam<Call> {};

TEST_P(InBody, IsRefusedOnEveryRank) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    Optimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    bool calls = false;
    auto step = smp::step([&](at::Tensor data, at::Tensor target) {
      if (calls) GetParam().make(model, optimizer);
      const at::Tensor loss = torch::mse_loss(model(data), target);
      model.backward(loss);
      return loss;
    });
    const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
    // Before the first step, and between steps.
    for (int round = 0; round < 2; ++round) {
      calls = true;
      const std::string message = message_of<c10::ValueError>([&] { step(data, target); });
      EXPECT_TRUE(contains(message, GetParam().refused_as + ": expected a call outside of step bodies"))
          << "rank " << rank() << ": " << message;
      calls = false;
      expect_bit_equal(step(data, target).outputs(), tests::eager_step(*twin, data, target, 2), "loss");
      tests::expect_twins(model, *twin, "after the refusal");
    }
    GetParam().make(model, optimizer);
  });
}

const Call kCalls[] = {
    {"zero_grad", "zero_grad", [](Model& model, Optimizer&) { model.zero_grad(); }},
    {"optimizer_zero_grad", "zero_grad", [](Model&, Optimizer& optimizer) { optimizer.zero_grad(); }},
    {"optimizer_step", "DistributedOptimizer::step", [](Model&, Optimizer& optimizer) { optimizer.step(); }},
    {"clip", "clip_grad_norm_", [](Model& model, Optimizer&) { clip_grad_norm_(model, 1.0); }},
    {"state_dict", "state_dict", [](Model& model, Optimizer&) { model.state_dict(); }},
    {"local_parameters", "local_parameters", [](Model& model, Optimizer&) { model.local_parameters(); }},
    {"local_named_parameters", "local_named_parameters", [](Model& model, Optimizer&) { model.local_named_parameters(); }},
    {"barrier", "smp::barrier", [](Model&, Optimizer&) { barrier(); }},
    {"all_reduce_mean", "smp::all_reduce_mean", [](Model&, Optimizer&) { all_reduce_mean(torch::ones({2})); }},
    {"send", "smp::send",
     [](Model&, Optimizer&) { rank() == 0 ? send(1, 1, WORLD_RANK) : void(recv_from<int>(0, WORLD_RANK)); }},
    {"recv_from", "smp::recv_from",
     [](Model&, Optimizer&) { rank() == 0 ? void(recv_from<int>(1, WORLD_RANK)) : send(1, 0, WORLD_RANK); }},
    {"broadcast", "smp::broadcast", [](Model&, Optimizer&) { broadcast(1, TP_GROUP); }},
    {"allgather", "smp::allgather", [](Model&, Optimizer&) { allgather(1, WORLD); }},
    {"new_group", "smp::new_group", [](Model&, Optimizer&) { new_group({0}); }},
    {"make_optimizer", "DistributedOptimizer",
     [](Model& model, Optimizer&) { Optimizer(torch::optim::SGD(model.module()->parameters(), 0.1), model); }},
};

INSTANTIATE_TEST_SUITE_P(Calls, InBody, testing::ValuesIn(kCalls), [](const auto& test) { return test.param.name; });

std::string refusal_in_body(const std::function<void(Model&)>& call) {
  std::string message;
  run_smp_ranks(1, {}, [&] {
    Model model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      call(model);
      return model(data);
    });
    message = message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
  });
  return message;
}

TEST(InBody, PartitionGuardNamesTheConstructor) {
  const std::string message = refusal_in_body([](Model&) { const PartitionGuard guard(0); });
  EXPECT_TRUE(contains(message, "PartitionGuard") && contains(message, "constructor")) << message;
}

TEST(InBody, SetPartitionAndShutdownAreRefused) {
  const std::string placed = refusal_in_body([](Model& model) { set_partition(*model.module()->first, 0); });
  EXPECT_TRUE(contains(placed, "set_partition: expected a call outside of step bodies")) << placed;
  const std::string ended = refusal_in_body([](Model&) { shutdown(); });
  EXPECT_TRUE(contains(ended, "smp::shutdown: expected a call outside of step bodies")) << ended;
}

TEST(InBody, AGuardOpenAroundAStepIsRefusedOnEveryRank) {
  run_smp_ranks(2, {}, [] {
    const auto net = make_net();
    Model model(net);
    auto step = tests::training_step(model);
    std::optional<PartitionGuard> guard(std::in_place, 0);
    const std::string message = message_of<c10::ValueError>([&] { step(rows(4, 8, 1), rows(4, 4, 2)); });
    EXPECT_TRUE(contains(message, "PartitionGuard") && contains(message, "before the step")) << message;
    guard.reset();
    EXPECT_NO_THROW(step(rows(4, 8, 1), rows(4, 4, 2)));
  });
}

}  // namespace
}  // namespace smp
