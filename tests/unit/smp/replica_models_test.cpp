// Several models on replicas, and models whose hooks or frozen parameters change between steps.
#include <gtest/gtest.h>

#include <functional>

#include "partitioner/plan/action.h"
#include "smp/engine/models/program.h"
#include "smp/engine/rank/rank_state.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::expect_close;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

/// Two models on two replicas, each with a step function of its own.
struct TwoModels {
  explicit TwoModels(int64_t passes_of_first = 1, ModelOptions options = {.name = "first"}) {
    options.backward_passes_per_step = passes_of_first;
    first = std::make_unique<DistributedModel<SmallNet>>(first_net, options);
    second = std::make_unique<DistributedModel<SmallNet>>(second_net, ModelOptions{.name = "second"});
  }
  void train(DistributedModel<SmallNet>& model, uint64_t seed) {
    auto& step = &model == first.get() ? first_step : second_step;
    step(rows(4, 8, seed));
  }
  static at::Tensor loss_of(const std::shared_ptr<SmallNet>& net, uint64_t seed) {
    return net->forward(rows(4, 8, seed)).square().mean();
  }

  std::shared_ptr<SmallNet> first_net = make_net(), second_net = make_net();
  std::unique_ptr<DistributedModel<SmallNet>> first, second;
  std::function<void(at::Tensor)> first_step =
      smp::step([this](at::Tensor x) { first->backward((*first)(x).square().mean()); });
  std::function<void(at::Tensor)> second_step =
      smp::step([this](at::Tensor x) { second->backward((*second)(x).square().mean()); });
};
constexpr int kTwoReplicas = 2;
const Config kOneStage = {.pipeline_parallel_degree = 1, .microbatches = 1};

TEST(ReplicaModels, ThatDifferInOneBitAreTold) {
  run_smp_ranks(6, {.pipeline_parallel_degree = 2, .microbatches = 2, .log_level = LogLevel::kOff}, [] {
    const auto net = tests::make_net();
    DistributedModel<SmallNet> model(net);
    auto step = tests::training_step(model);
    EXPECT_TRUE(contains(message_of([&] { model.check_replicas(); }), "expected a call after the first step"));
    step(rows(8, 8, 1), rows(8, 4, 2));
    model.check_replicas();
    std::string changed;
    if (rank() == size() - 1) {
      const auto [name, parameter] = model.local_named_parameters().back();
      changed = name;
      const at::Tensor bits = parameter.detach().view(at::kInt).view(-1);
      bits[bits.numel() - 1].bitwise_xor_(1);
    }
    changed = allgather(changed, CommGroup::WORLD).back();
    EXPECT_TRUE(contains(message_of([&] { model.check_replicas(); }),
                         "parameter '" + changed + "', got one value on replicas 0, 1 and another on replica 2"));
  });
}

TEST(ReplicaModels, BackwardPassesPerStepCountsTheStepsOfItsModel) {
  run_smp_ranks(kTwoReplicas, kOneStage, [] {
    TwoModels both(2);
    for (int i = 0; i < 2; ++i) {
      both.first->zero_grad();
      const auto twin = make_net();
      for (const uint64_t seed : {10, 12}) {
        both.train(*both.first, 100 * i + seed + dp_rank());
        for (const int replica : {0, 1}) {
          (TwoModels::loss_of(twin, 100 * i + seed + replica) / 2).backward();
        }
      }
      const at::Tensor want = twin->second->weight.grad();
      expect_close(both.first_net->second->weight.grad(), want, 1e-5, "mean of two passes");
      both.train(*both.second, 50);  // counts nothing for the first
    }
  });
}

// As in a GAN, whose critic is trained on what the generator makes.
TEST(ReplicaModels, AModelThatNoBackwardReachesIsNeitherAveragedNorCounted) {
  run_smp_ranks(kTwoReplicas, kOneStage, [] {
    TwoModels both;
    int64_t calls = 0;
    both.first->register_comm_hook([&](const GradientBucket& bucket) {
      ++calls;
      return all_reduce_mean(bucket.gradients, DP_GROUP) * dp_size();
    });
    both.train(*both.first, dp_rank());
    const at::Tensor sums = both.first_net->second->weight.grad().clone();
    EXPECT_EQ(calls, 1);
    auto reads = smp::step([&](at::Tensor x) {
      const at::Tensor made = (*both.first)(x).detach();
      both.second->backward((*both.second)(torch::cat({made, made}, 1)).mean());
    });
    reads(rows(4, 8, 7));
    EXPECT_EQ(calls, 1);
    expect_bit_equal(both.first_net->second->weight.grad(), sums, "after a step of the other model");
  });
}

TEST(ReplicaModels, AModelThatOneReplicaTrainsIsAveragedOnAll) {
  run_smp_ranks(kTwoReplicas, kOneStage, [] {
    TwoModels both;
    bool trains_second = true;
    auto step = smp::step([&](at::Tensor x) {
      at::Tensor loss = (*both.first)(x).square().mean();
      if (trains_second) loss = loss + (*both.second)(x).square().mean();
      both.first->backward(loss);
    });
    step(rows(4, 8, 1));
    both.first->zero_grad(), both.second->zero_grad();
    trains_second = dp_rank() == 1;
    step(rows(4, 8, 2));
    const auto twin = make_net();
    (TwoModels::loss_of(twin, 2) / 2).backward();
    expect_close(both.second_net->second->weight.grad(), twin->second->weight.grad(), 1e-6, "of one");
  });
}

TEST(ReplicaModels, AParameterThatIsUnfrozenLaterPassesThroughTheHook) {
  for (const int stages : {1, 2}) {
    run_smp_ranks(2 * stages, {.pipeline_parallel_degree = stages, .microbatches = 1}, [] {
      const auto net = make_net();
      DistributedModel model(net);
      net->first->weight.set_requires_grad(false);
      model.register_comm_hook([](const GradientBucket& bucket) { return all_reduce_mean(bucket.gradients, DP_GROUP) * 0; });
      auto step = tests::training_step(model);
      step(rows(4, 8, 1), rows(4, 4, 1));
      for (const bool on : {true, false, true}) {
        net->first->weight.set_requires_grad(on);
        model.zero_grad();
        step(rows(4, 8, 1), rows(4, 4, 1));
        for (const auto& [name, parameter] : model.local_named_parameters()) {
          const bool is_trained = on || name != "first.weight";
          EXPECT_EQ(parameter.grad().defined(), is_trained) << name;
          EXPECT_TRUE(!is_trained || parameter.grad().abs().max().item<float>() == 0) << name;
        }
      }
    });
  }
}

TEST(ReplicaModels, RefusesRanksThatFreezeOtherParametersOrHaveOtherHooks) {
  const auto trains_after = [](bool is_follower, const std::function<void(DistributedModel<SmallNet>&)>& change) {
    return message_of([&] {
      run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 1}, [&] {
        DistributedModel model(make_net());
        auto step = tests::training_step(model);
        step(rows(4, 8, 1), rows(4, 4, 1));
        if (dp_rank() == 1 && (pp_rank() == 1) == is_follower) change(model);
        step(rows(4, 8, 1), rows(4, 4, 1));
      });
    });
  };
  for (const bool is_follower : {true, false}) {
    const std::string hook = trains_after(is_follower, [](auto& model) { model.register_comm_hook(bf16_compress_hook); });
    EXPECT_TRUE(contains(hook, "no communication hook after 0") && contains(hook, ", communication hook after 1")) << hook;
    const std::string frozen =
        trains_after(is_follower, [](auto& model) { model.module()->first->weight.set_requires_grad(false); });
    EXPECT_TRUE(contains(frozen, "8 of 8 parameters") && contains(frozen, "7 of 8 parameters")) << frozen;
  }
}

TEST(ReplicaModels, RefusesTrainingAfterAnOptimizerStepOnSomeRanksOnly) {
  for (const int skips : {-1, 0, 1, 2, 3}) {
    const auto train = [&] {
      run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 1}, [&] {
        const auto net = make_net();
        DistributedModel model(net);
        DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
        auto step = tests::training_step(model);
        for (int s = 0; s < 3; ++s) {
          step(rows(4, 8, 1), rows(4, 4, 1));
          if (s == 0 || rank() != skips) optimizer.step();
        }
      });
    };
    const std::string text = message_of<c10::ValueError>(train);
    EXPECT_EQ(contains(text, "got 2 calls on ") || contains(text, "got 1 calls on "), skips >= 0) << skips << text;
    EXPECT_EQ(contains(text, "Call step() of every optimizer on every rank"), skips >= 0) << text;
  }
}

TEST(ReplicaModels, RefusesTrainingAfterStepsOfOtherOptimizers) {
  const auto train = [] {
    run_smp_ranks(2, {.pipeline_parallel_degree = 2, .microbatches = 1}, [] {
      const auto net = make_net();
      DistributedModel model(net);
      DistributedOptimizer front(torch::optim::SGD(net->first->parameters(), 0.1), model);
      DistributedOptimizer back(torch::optim::SGD(net->fourth->parameters(), 0.1), model);
      auto step = tests::training_step(model);
      step(rows(4, 8, 1), rows(4, 4, 1));
      rank() == 0 ? front.step() : back.step();
      step(rows(4, 8, 1), rows(4, 4, 1));
    });
  };
  const std::string text = message_of<c10::ValueError>(train);
  EXPECT_TRUE(contains(text, "got 1, 0 calls on pipeline rank 0 and 0, 1 on pipeline rank 1")) << text;
}

TEST(ReplicaModels, RefusesToSaveAfterAnOptimizerStepOnSomeRanksOnlyUntilAStateIsLoaded) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 1}, [&] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    auto step = tests::training_step(model);
    step(rows(4, 8, 1), rows(4, 4, 1));
    optimizer.step();
    const StateDict state = model.state_dict();
    if (pp_rank() == 0) optimizer.step();
    for (const std::string& text : {message_of<c10::ValueError>([&] { model.state_dict(); }),
                                    message_of<c10::ValueError>([&] { save_state("never_made", model, optimizer); })}) {
      EXPECT_TRUE(contains(text, "got 2 calls on ") && contains(text, "and 1 on ")) << text;
    }
    model.load_state_dict(state);
    step(rows(4, 8, 1), rows(4, 4, 1));
    optimizer.step();
    EXPECT_EQ(model.state_dict().entries.size(), state.entries.size());
  });
}

// On a replica, on a rank of a pipeline; from the beginning, or after an update.
TEST(ReplicaModels, RefusesTrainingWithOtherOptimizerOptionsOnSomeRanksBeforeAnUpdate) {
  for (const int differs : {-1, 0, 1, 2, 3}) {
    for (const int since : {0, 1}) {
      int updates = 0;
      const auto train = [&] {
        run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 1}, [&] {
          const auto net = make_net();
          DistributedModel model(net);
          DistributedOptimizer optimizer(torch::optim::AdamW(net->parameters(), 0.1), model);
          auto step = tests::training_step(model);
          for (int s = 0; s < 2; ++s) {
            if (s == since && rank() == differs) optimizer.get().param_groups()[0].options().set_lr(0.2);
            step(rows(4, 8, 1), rows(4, 4, 1));
            optimizer.step();
            if (rank() == 0) ++updates;
          }
        });
      };
      const std::string text = message_of<c10::ValueError>(train);
      EXPECT_EQ(contains(text, "optimizer 0 (AdamW), group 0: lr = 0.1' on "), differs >= 0) << differs << text;
      EXPECT_EQ(contains(text, "optimizer 0 (AdamW), group 0: lr = 0.2' on "), differs >= 0) << differs << text;
      EXPECT_EQ(updates, differs >= 0 ? since : 2) << differs;
    }
  }
}

TEST(ReplicaModels, RefusesTrainingAndSavingWithOtherGroupsOrKindsOfOptimizers) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1}, [] {
    using torch::optim::OptimizerParamGroup;
    const auto net = make_net();
    DistributedModel model(net);
    auto step = tests::training_step(model);
    std::vector<OptimizerParamGroup> groups{OptimizerParamGroup(net->first->parameters()),
                                            OptimizerParamGroup(net->second->parameters())};
    if (rank() == 1) std::swap(groups[0], groups[1]);
    const auto refusals = [&] {
      return std::vector{message_of<c10::ValueError>([&] { step(rows(4, 8, 1), rows(4, 4, 1)); }),
                         message_of<c10::ValueError>([&] { save_state("never_made", model); })};
    };
    {
      DistributedOptimizer optimizer(torch::optim::SGD(groups, 0.1), model);
      for (const std::string& text : refusals()) {
        EXPECT_TRUE(contains(text, "'optimizer 0 (SGD), group 0: 2 parameters (pattern ")) << text;
      }
    }
    DistributedOptimizer sgd(torch::optim::SGD(net->parameters(), 0.1), model);
    if (rank() == 1) sgd.get().param_groups()[0].options().set_lr(0.3);
    for (const std::string& text : refusals()) {
      EXPECT_TRUE(contains(text, "lr = 0.1' on re") || contains(text, "lr = 0.1' on ra")) << text;
      EXPECT_TRUE(contains(text, "lr = 0.3' on re") || contains(text, "lr = 0.3' on ra")) << text;
    }
    sgd.get().param_groups()[0].options().set_lr(0.1);
    step(rows(4, 8, 1), rows(4, 4, 1));
    sgd.step();
  });
}

struct Deep : torch::nn::Module {
  Deep() {
    for (int i = 0; i < 6; ++i) layers->push_back(torch::nn::Linear(torch::nn::LinearOptions(256, 256).bias(false)));
    register_module("layers", layers);
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : parameters()) parameter.normal_(0, 0.05, tests::generator(3));
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};

TEST(ReplicaModels, MessagesOfModelsDoNotMixAfterOneIsGone) {
  run_smp_ranks(kTwoReplicas, kOneStage, [] {
    auto gone = std::make_unique<DistributedModel<SmallNet>>(make_net(), ModelOptions{.name = "gone"});
    const auto net = std::make_shared<Deep>(), other = std::make_shared<Deep>(), twin = std::make_shared<Deep>();
    DistributedModel first(net, {.name = "first", .bucket_cap_mb = 1});
    auto alone = smp::step([&](at::Tensor x) { first.backward(first(x).square().mean()); });
    alone(rows(4, 256, 1));
    gone.reset();
    DistributedModel second(other, {.name = "second", .bucket_cap_mb = 1});
    auto step = smp::step([&](at::Tensor x) { first.backward((first(x) + 2 * second(x)).square().mean()); });
    for (const int replica : {0, 1}) ((3 * twin->forward(rows(4, 256, replica))).square().mean() / 2).backward();
    for (int i = 0; i < 6; ++i) {
      first.zero_grad(), second.zero_grad();
      for (int work = 0; dp_rank() == i % 2 && work < i; ++work) torch::ones({512, 512}).mm(torch::ones({512, 512}));
      step(rows(4, 256, dp_rank()));
      for (size_t p = 0; p < net->parameters().size(); ++p) {
        const at::Tensor want = twin->parameters()[p].grad();
        expect_close(net->parameters()[p].grad(), want / 3, 1e-4, "first");
        expect_close(other->parameters()[p].grad(), want * 2 / 3, 1e-4, "second");
      }
    }
  });
}

using Columns = std::vector<std::vector<partitioner::Action>>;

/// Each microbatch's weight gradients behind the backward of the next, on two stages.
Columns late_weights(int num_microbatches) {
  using partitioner::ActionKind;
  Columns columns(2);
  for (int m = 0; m < num_microbatches; ++m) columns[0].push_back({ActionKind::kForward, 0, m});
  for (const int stage : {0, 1}) {
    std::vector<partitioner::Action>& column = columns[static_cast<size_t>(stage)];
    for (int m = 0; m < num_microbatches; ++m) {
      if (stage == 1) column.push_back({ActionKind::kForward, stage, m});
      column.push_back({ActionKind::kBackward, stage, m});
      if (m > 0) column.push_back({ActionKind::kWeightGradient, stage, m - 1});
    }
    column.push_back({ActionKind::kWeightGradient, stage, num_microbatches - 1});
  }
  return columns;
}

/// The program of the first model, as if its plan had come with this table.
std::shared_ptr<engine::Program> with_table(const Columns& table) {
  engine::RankState& rank = engine::rank_state("test");
  const auto known = rank.models.all().front()->first_program;
  partitioner::Plan plan = known->plan;
  plan.table = table;
  rank.programs.erase(known->hash);
  const auto program = rank.programs.add(known->graph, std::move(plan), known->hash);
  program->constants = known->constants;
  return program;
}

TEST(ReplicaModels, ATableWithLateWeightGradientsIsAveragedWhole) {
  constexpr int kMicrobatches = 4, kSteps = 6;  // the first ones record and compare tapes
  run_smp_ranks(2 * kTwoReplicas, {.pipeline_parallel_degree = 2, .microbatches = kMicrobatches}, [] {
    const auto net = make_net(), late_net = make_net();
    DistributedModel late_model(late_net, {.name = "late"}), model(net, {.name = "usual"});
    auto late_step = tests::training_step(late_model), step = tests::training_step(model);
    const auto train = [](auto& distributed, auto& function, uint64_t seed) {
      distributed.zero_grad();
      function(rows(8, 8, 100 * seed + dp_rank()), rows(8, 4, seed));
    };
    train(late_model, late_step, 1);
    const auto program = with_table(late_weights(kMicrobatches));
    for (int s = 0; s < kSteps; ++s) {
      train(model, step, s);
      train(late_model, late_step, s);
      tests::expect_twins(late_model, *net, "step " + std::to_string(s));
    }
    const auto& [index, stage] = *program->rank_program.stages.begin();
    EXPECT_EQ(stage->report().num_weight_calls > 0, index == 1)
        << "behind the gradients that leave: the first stage has none";
  });
}

}  // namespace
}  // namespace smp
