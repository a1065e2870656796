// smp::join: replicas with different numbers of batches, against one loop over all of them.
#include <gtest/gtest.h>

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

struct Case {
  int ranks;
  int64_t pipeline_ranks;
  std::vector<int> batches;  // by replica
};

Config config_of(const Case& uneven) {
  return {.pipeline_parallel_degree = uneven.pipeline_ranks, .microbatches = 2, .log_level = LogLevel::kOff};
}

at::Tensor batch(int replica, int step) { return rows(4, 8, 100 * replica + step, at::kDouble); }

// Sums over the replicas that have a batch, divided by all or by those.
void train_twin(SmallNet& net, const std::vector<int>& batches, bool by_all, torch::optim::Optimizer& optimizer) {
  const int most = *std::max_element(batches.begin(), batches.end());
  for (int s = 0; s < most; ++s) {
    optimizer.zero_grad();
    int active = 0;
    for (const int count : batches) active += s < count;
    for (size_t r = 0; r < batches.size(); ++r) {
      if (s >= batches[r]) continue;
      const double divisor = by_all ? static_cast<double>(batches.size()) : active;
      (net.forward(batch(static_cast<int>(r), s)).square().mean() / divisor).backward();
    }
    optimizer.step();
  }
}

class Join : public ::testing::TestWithParam<std::tuple<Case, bool, bool>> {};
INSTANTIATE_TEST_SUITE_P(Cases, Join,
                         ::testing::Combine(::testing::Values(Case{2, 1, {3, 1}}, Case{2, 1, {1, 4}}, Case{4, 2, {2, 5}},
                                                              Case{4, 2, {5, 2}}, Case{3, 1, {2, 4, 3}}, Case{2, 2, {3}}),
                                            ::testing::Bool(), ::testing::Bool()));

TEST_P(Join, TrainsAsOneLoopOverAllBatches) {
  const auto& [uneven, by_all, reads] = GetParam();
  run_smp_ranks(uneven.ranks, config_of(uneven), [&uneven = uneven, by_all = by_all, reads = reads] {
    const auto net = make_net(at::kDouble), twin = make_net(at::kDouble);
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 0.01), model);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      if (reads && dp_rank() % 2 == 1) {
        EXPECT_GT(loss.item<double>(), 0);
      }
      model.backward(loss);
      return loss;
    });
    const int mine = uneven.batches[static_cast<size_t>(dp_rank())];
    smp::join(
        [&] {
          for (int s = 0; s < mine; ++s) {
            optimizer.zero_grad();
            step(batch(dp_rank(), s));
            optimizer.step();
          }
        },
        {.divide_by_initial_world_size = by_all});
    torch::optim::Adam eager(twin->parameters(), 0.01);
    train_twin(*twin, uneven.batches, by_all, eager);
    const auto want = twin->named_parameters();
    for (const auto& [name, parameter] : model.local_named_parameters()) {
      EXPECT_TRUE(at::allclose(parameter.cpu(), want[name], 1e-9, 1e-10)) << name;
    }
    // The optimizers are equal again too: one more common step.
    optimizer.zero_grad(), eager.zero_grad();
    step(batch(0, 50));
    twin->forward(batch(0, 50)).square().mean().backward();
    optimizer.step(), eager.step();
    for (const auto& [name, parameter] : model.local_named_parameters()) {
      EXPECT_TRUE(at::allclose(parameter.cpu(), want[name], 1e-9, 1e-10)) << name;
      const std::vector<at::Tensor> all = allgather(parameter.detach().cpu().clone(), CommGroup::DP_GROUP);
      for (const at::Tensor& other : all) expect_bit_equal(parameter, other, name);
    }
  });
}

// Those of a replica that still has batches, not of replica 0, which has none.
TEST(JoinBuffers, AreThoseOfTheReplicaThatGoesOn) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = std::make_shared<tests::NormNet>(), twin = std::make_shared<tests::NormNet>();
    tests::fill(*net), tests::fill(*twin);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    const int mine = dp_rank() == 0 ? 1 : 4;
    smp::join([&] {
      for (int s = 0; s < mine; ++s) step(rows(4, 8, 10 * dp_rank() + s));
    });
    // Both start a step with the buffers of the first that has a batch, and replica 1 ends with its own.
    twin->forward(rows(4, 8, 0));
    const at::Tensor after_first = twin->norm->running_mean.clone();
    for (int s = 1; s < 4; ++s) twin->forward(rows(4, 8, 10 + s));
    const at::Tensor mean = net->norm->running_mean.cpu();
    const std::vector<at::Tensor> all = allgather(mean.clone(), CommGroup::DP_GROUP);
    expect_bit_equal(all[0], all[1], "running mean");
    EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 4);
    EXPECT_FALSE(at::equal(mean, after_first));
  });
}

TEST(JoinGradients, ThatWereKeptByNoSyncCountOnce) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net(at::kDouble), twin = make_net(at::kDouble);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    step(batch(7, 7));  // places the model
    model.zero_grad();
    smp::join([&] {
      {
        NoSync guard(model);
        step(batch(dp_rank(), 0));
      }
      if (dp_rank() == 1) step(batch(1, 1));
    });
    for (const auto& [r, s] : {std::pair{0, 0}, {1, 0}, {1, 1}}) (twin->forward(batch(r, s)).square().mean() / 2).backward();
    for (const auto& named : twin->named_parameters()) {
      EXPECT_TRUE(at::allclose(net->named_parameters()[named.key()].grad().cpu(), named.value().grad(), 1e-10, 1e-12))
          << named.key();
    }
  });
}

TEST(JoinEvaluation, NeedsNoBatchFromOthers) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    step(rows(4, 8, 1));
    smp::join([&] {
      for (int s = 0; s < 2 + 3 * dp_rank(); ++s) EXPECT_EQ(step(rows(4, 8, s)).concat().size(0), 4);
    });
    step(rows(4, 8, 1));
  });
}

TEST(JoinEnds, EarlyWhereThatIsAskedFor) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    std::string inner;
    const std::string text = message_of<std::exception>([&] {
      smp::join(
          [&] {
            for (int s = 0; s < 1 + dp_rank() && inner.empty(); ++s) {
              inner = message_of<c10::ValueError>([&] { step(rows(4, 8, s)); });
            }
          },
          {.throw_on_early_termination = true});
    });
    const std::string& seen = dp_rank() == 0 ? text : inner;
    EXPECT_TRUE(contains(seen, "got none on replica 0 and one on replica 1")) << text << " / " << inner;
  });
}

TEST(JoinEnds, EarlyAndTheJobGoesOn) {
  for (const bool reads : {false, true}) {
    run_smp_ranks(4, {.pipeline_parallel_degree = 2, .log_level = LogLevel::kOff}, [reads] {
      const at::NoGradGuard no_grad;
      DistributedModel model(make_net());
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor result = model(data);
        EXPECT_FALSE(reads && std::isnan(result.sum().item<float>()));
        return result;
      });
      const auto run = [&] {
        for (int s = 0; s < 1 + dp_rank(); ++s) step(rows(4, 8, s));
      };
      const auto join_early = [](const std::function<void()>& loop) {
        return message_of<c10::ValueError>([&] { smp::join(loop, {.throw_on_early_termination = true}); });
      };
      const std::string text = join_early(run);
      EXPECT_TRUE(contains(text, "got none on replica 0 and one on replica 1")) << text;
      barrier(CommGroup::WORLD);
      EXPECT_EQ(step(rows(4, 8, 7)).concat().size(0), 4);
      // A loop that goes on although its step has said so is told again.
      join_early([&] {
        if (message_of<c10::ValueError>(run).empty()) return;
        const std::string again = message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
        EXPECT_TRUE(contains(again, "has ended early")) << again;
      });
      EXPECT_EQ(step(rows(4, 8, 7)).concat().size(0), 4);
    });
  }
}

TEST(JoinRefuses, TheStateOfAnOptimizerWhoseLoadWaits) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    optimizer.load_state_dict(optimizer.state_dict());
    smp::join([&] {
      for (const std::string& text : {message_of<c10::ValueError>([&] { optimizer.state_dict(); }),
                                      message_of<c10::ValueError>([&] { optimizer.local_state_dict(); })}) {
        EXPECT_TRUE(contains(text, "outside of smp::join")) << text;
      }
    });
    EXPECT_EQ(optimizer.state_dict().groups.size(), 1U);
  });
}

TEST(JoinRefuses, WhatAllReplicasDoTogether) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    smp::join([&] {
      const auto refused = [](const std::function<void()>& call) {
        const std::string text = message_of<c10::ValueError>(call);
        EXPECT_TRUE(contains(text, "smp::join")) << text;
      };
      refused([] { barrier(CommGroup::WORLD); });
      refused([] { all_reduce_mean(at::ones({1}), CommGroup::DP_GROUP); });
      refused([] { new_group({0, 1}); });
      refused([&] { model.load_state_dict(model.state_dict()); });
      refused([&] { optimizer.load_state_dict(optimizer.state_dict()); });
      refused([] { smp::join([] {}); });
      barrier(CommGroup::PP_GROUP);
      EXPECT_EQ(get_dp_process_group().rank(), dp_rank());  // asks nobody
    });
    barrier(CommGroup::WORLD);
  });
}

TEST(JoinRefuses, OptionsThatDifferAndAReplicaWithoutABatch) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .log_level = LogLevel::kOff}, [] {
    DistributedModel model(make_net());
    const std::string text =
        message_of<c10::ValueError>([] { smp::join([] {}, {.divide_by_initial_world_size = rank() == 0}); });
    EXPECT_TRUE(contains(text, "same options on all ranks, got {.divide_by_initial_world_size = true, ")) << text;
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    std::string refused;
    smp::join([&] {
      if (rank() == 1) refused = message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
    });
    if (rank() == 1) {
      EXPECT_TRUE(contains(refused, "at least one in smp::join")) << refused;
    }
    model.register_comm_hook(bf16_compress_hook);
    EXPECT_THROW(smp::join([] {}, {.divide_by_initial_world_size = false}), c10::ValueError);
  });
}

// Each step that reads makes models alike that no step has placed, on all replicas.
TEST(JoinReads, BesideAModelThatNoStepHasUsed) {
  for (const int stages : {1, 2}) {
    run_smp_ranks(2 * stages, {.pipeline_parallel_degree = stages, .microbatches = 2, .log_level = LogLevel::kOff}, [] {
      DistributedModel model(make_net()), unused(make_net(), ModelOptions{.name = "unused"});
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = model(data).square().mean();
        EXPECT_GT(loss.item<double>(), 0);
        model.backward(loss);
        return loss;
      });
      const int mine = dp_rank() == 0 ? 2 : 5;
      smp::join([&] {
        for (int s = 0; s < mine; ++s) step(rows(4, 8, s));
      });
    });
  }
}

TEST(JoinEnds, WithTheCycleOfPassesBegunAnew) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1, .log_level = LogLevel::kOff}, [] {
    const auto net = make_net();
    DistributedModel model(net, ModelOptions{.backward_passes_per_step = 2});
    auto step = tests::training_step(model);
    const auto train = [&](int batches) {
      for (int s = 0; s < batches; ++s) step(rows(4, 8, 10 * dp_rank() + s), rows(4, 4, s));
    };
    smp::join([&] { train(dp_rank() == 0 ? 1 : 3); });
    model.zero_grad();
    train(2);
    const std::vector<at::Tensor> all = allgather(net->first->weight.grad().cpu().clone(), CommGroup::DP_GROUP);
    expect_bit_equal(all[0], all[1], "averaged after two passes");
  });
}

TEST(JoinEnds, WithoutSpreadingAnUpdateThatARankHasMissed) {
  const auto train = [](int skips) {
    run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 1, .log_level = LogLevel::kOff}, [skips] {
      const auto net = make_net();
      DistributedModel model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
      auto step = tests::training_step(model);
      const int mine = dp_rank() == 0 ? 2 : 3;
      smp::join([&] {
        for (int s = 0; s < mine; ++s) {
          step(rows(4, 8, s), rows(4, 4, s));
          if (s + 1 < mine || rank() != skips) optimizer.step();
        }
      });
    });
  };
  EXPECT_EQ(message_of<std::exception>([&] { train(-1); }), "");
  for (const int skips : {0, 1, 2, 3}) {
    const std::string text = message_of<c10::ValueError>([&] { train(skips); });
    EXPECT_TRUE(contains(text, "step() equally often, got ")) << skips << text;
  }
}

TEST(JoinEnds, BehindTheLastModel) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1, .log_level = LogLevel::kOff}, [] {
    std::vector<at::Tensor> losses;
    smp::join([&] {
      const auto net = make_net();
      DistributedModel model(net);
      losses = tests::training_step(model)(rows(4, 8, 1), rows(4, 4, 2)).outputs();
    });
    EXPECT_EQ(losses.size(), 1U);
  });
}

TEST(JoinOptions, OutliveTheLastModel) {
  run_smp_ranks(2, {.pipeline_parallel_degree = 1, .microbatches = 1, .log_level = LogLevel::kOff}, [] {
    {
      DistributedModel first(make_net());
    }
    const auto net = make_net(), twin = make_net();
    std::optional<DistributedModel<SmallNet>> model;
    smp::join(
        [&] {
          {
            DistributedModel another(make_net());
          }
          model.emplace(net);
          auto step = tests::training_step(*model);
          step(rows(4, 8, 1), rows(4, 4, 1));
          model->zero_grad();
          if (rank() == 1) step(rows(4, 8, 2), rows(4, 4, 2));
        },
        {.divide_by_initial_world_size = false});
    at::mse_loss(twin->forward(rows(4, 8, 2)), rows(4, 4, 2)).backward();
    for (const auto& named : twin->named_parameters()) {
      expect_bit_equal(net->named_parameters()[named.key()].grad(), named.value().grad(), named.key());
    }
  });
}

// Replica 0 has let its model go; the other would go on with it.
TEST(JoinRefuses, StepsOfModelsThatAReplicaHasEnded) {
  const std::string text = message_of<c10::ValueError>([] {
    run_smp_ranks(4, {.pipeline_parallel_degree = 2, .log_level = LogLevel::kOff}, [] {
      smp::join([&] {
        DistributedModel model(make_net());
        auto step = smp::step([&](at::Tensor data) { return model(data); });
        for (int s = 0; s < 1 + dp_rank(); ++s) step(rows(4, 8, s));
      });
    });
  });
  EXPECT_TRUE(contains(text, "expected the same models on all replicas, got 1 on replica 1 and 0 on replica 0")) << text;
}

TEST(JoinEnds, TheJobWhenTheLoopThrows) {
  const std::string text = message_of<std::exception>([] {
    run_smp_ranks(2, {.pipeline_parallel_degree = 1, .log_level = LogLevel::kOff}, [] {
      DistributedModel model(make_net());
      smp::join([&] {
        if (rank() == 1) throw std::runtime_error("out of memory");
      });
    });
  });
  EXPECT_TRUE(contains(text, "out of memory")) << text;
}

}  // namespace
}  // namespace smp
