// Replicas, optimizers, clipping, saving and placement by hand: the same numbers on any number of ranks.
#include <algorithm>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using support::expect_close;
using tests::eager_step;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using tests::training_step;
using Model = DistributedModel<SmallNet>;

/// What a job of several ranks leaves behind, put together from all of them.
struct Trained {
  std::vector<at::Tensor> losses;  // one per step, mean over microbatches and replicas
  std::map<std::string, at::Tensor> gradients;
  std::map<std::string, at::Tensor> parameters;
};

struct Job {
  int ranks = 1;
  int stages = 1;
  double dropout = 0.0;
};

// Three steps of SGD in float64 on a global batch of 16 rows in 4 microbatches, dealt to the replicas in order.
Trained train(const Job& job) {
  std::mutex mutex;
  Trained all;
  const int replicas = job.ranks / job.stages;
  run_smp_ranks(job.ranks, {.pipeline_parallel_degree = job.stages, .microbatches = 4 / replicas, .seed = 9}, [&] {
    const auto net = make_net(at::kDouble, job.dropout);
    if (dp_rank() > 0) tests::fill(*net, 77);  // dp_rank 0's values must win
    Model model(net);
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    auto step = training_step(model);
    std::vector<at::Tensor> losses;
    for (int s = 0; s < 3; ++s) {
      const at::Tensor data = rows(16, 8, 10 + s, at::kDouble), target = rows(16, 4, 20 + s, at::kDouble);
      const int64_t mine = 16 / replicas;
      optimizer.zero_grad();
      const StepOutput loss = step(data.narrow(0, dp_rank() * mine, mine), target.narrow(0, dp_rank() * mine, mine));
      losses.push_back(all_reduce_mean(loss.reduce_mean()));
      optimizer.step();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    all.losses = losses;
    for (const auto& [name, tensor] : model.local_named_parameters()) {
      if (all.parameters.contains(name)) {
        expect_bit_equal(tensor, all.parameters[name], "two replicas' " + name);
      }
      all.gradients[name] = tensor.grad().clone();
      all.parameters[name] = tensor.detach().clone();
    }
  });
  return all;
}

class Replicas : public testing::TestWithParam<std::tuple<Job, double>> {};

TEST_P(Replicas, EqualOneReplicaWithTheSameGlobalBatch) {
  Job job = std::get<0>(GetParam());
  job.dropout = std::get<1>(GetParam());
  const Trained want = train({.ranks = 1, .stages = 1, .dropout = job.dropout});
  const Trained got = train(job);
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (size_t s = 0; s < want.losses.size(); ++s) {
    expect_close(got.losses[s], want.losses[s], 1e-12, "loss of step " + std::to_string(s));
  }
  expect_close(got.gradients, want.gradients, 1e-12, "gradient");
  expect_close(got.parameters, want.parameters, 1e-12, "parameter");
}

TEST(Replicas, DropoutChangesTheNumbers) {
  const Trained without = train({}), with = train({.dropout = 0.5});
  EXPECT_GT(support::relative_difference(with.losses[0], without.losses[0]), 1e-3);
}

INSTANTIATE_TEST_SUITE_P(Grids, Replicas,
                         testing::Combine(testing::Values(Job{.ranks = 2, .stages = 1}, Job{.ranks = 4, .stages = 2},
                                                          Job{.ranks = 4, .stages = 1}, Job{.ranks = 2, .stages = 2}),
                                          testing::Values(0.0, 0.5)),
                         [](const auto& test) {
                           const Job& job = std::get<0>(test.param);
                           return std::to_string(job.ranks / job.stages) + "x" + std::to_string(job.stages) +
                                  (std::get<1>(test.param) > 0 ? "_dropout" : "");
                         });

class Stages : public testing::TestWithParam<int> {};

TEST_P(Stages, ClipLikeTorchOnOneRank) {
  for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    for (const double max_norm : {0.01, 1e6}) {
      run_smp_ranks(GetParam(), {.microbatches = 2}, [&] {
        const auto net = make_net(), twin = make_net();
        Model model(net);
        auto step = training_step(model);
        step(rows(4, 8, 1), rows(4, 4, 2));
        eager_step(*twin, rows(4, 8, 1), rows(4, 4, 2), 2);
        const double want = torch::nn::utils::clip_grad_norm_(twin->parameters(), max_norm, norm_type);
        EXPECT_EQ(clip_grad_norm_(model, max_norm, norm_type), want) << "norm " << norm_type;
        expect_twins(model, *twin, "clipped");
      });
    }
  }
}

TEST_P(Stages, TrainWithAdamWAndStepLrLikeOneProcess) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    const auto options = torch::optim::AdamWOptions(1e-2).weight_decay(0.1);
    DistributedOptimizer optimizer(torch::optim::AdamW(net->parameters(), options), model);
    torch::optim::AdamW eager_optimizer(twin->parameters(), options);
    torch::optim::StepLR scheduler(optimizer, 2, 0.5), eager_scheduler(eager_optimizer, 2, 0.5);
    auto step = training_step(model);
    for (int s = 0; s < 5; ++s) {
      const at::Tensor data = rows(8, 8, 10 + s), target = rows(8, 4, 20 + s);
      optimizer.zero_grad();
      eager_optimizer.zero_grad();
      expect_bit_equal(step(data, target).outputs(), eager_step(*twin, data, target, 2), "loss");
      optimizer.step();
      eager_optimizer.step();
      scheduler.step();
      eager_scheduler.step();
      const double rate = optimizer.get().param_groups()[0].options().get_lr();
      EXPECT_EQ(rate, eager_optimizer.param_groups()[0].options().get_lr());
      EXPECT_EQ(rate < 1e-2, s >= 2) << "after step " << s;
      expect_twins(model, *twin, "step " + std::to_string(s));
    }
  });
}

TEST_P(Stages, SaveWhatAPlainModuleLoads) {
  std::mutex mutex;
  int loaded = 0;
  run_smp_ranks(GetParam(), {}, [&] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    auto step = training_step(model);
    step(rows(4, 8, 1), rows(4, 4, 2));
    const StateDict state = model.state_dict();
    const std::lock_guard<std::mutex> lock(mutex);
    std::stringstream file;
    torch::save(state, file);
    auto plain = std::make_shared<SmallNet>();
    torch::load(plain, file);
    for (const auto& item : plain->named_parameters()) {
      expect_bit_equal(item.value(), twin->named_parameters()[item.key()], item.key());
      ++loaded;
    }
  });
  EXPECT_EQ(loaded, 8 * GetParam());
}

INSTANTIATE_TEST_SUITE_P(Count, Stages, testing::Values(1, 2, 3, 4));

/// SmallNet with each layer made under the guard of its stage.
struct GuardedNet : torch::nn::Module {
  explicit GuardedNet(const std::vector<int>& stages = {}) {
    for (size_t i = 0; i < stages.size(); ++i) {
      const PartitionGuard guard(stages[i]);
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(8, 8)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (torch::nn::Linear& layer : layers) x = torch::tanh(layer(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

struct Placement {
  std::vector<int> stages;  // of the layers in forward order
  bool by_guard;
};

class Placed : public testing::TestWithParam<Placement> {};

TEST_P(Placed, ByHandEqualsTheUnsplitModel) {
  const auto& [stages, by_guard] = GetParam();
  const auto make = [&stages = stages](bool guards, bool pins) {
    auto net = std::make_shared<GuardedNet>(guards ? stages : std::vector<int>(stages.size()));
    tests::fill(*net);
    for (size_t i = 0; i < stages.size() && pins; ++i) set_partition(*net->layers[i], stages[i]);
    return net;
  };
  tests::Loop<GuardedNet> loop{.steps = 3, .config = {.microbatches = 2}};
  loop.ranks = 1 + *std::max_element(stages.begin(), stages.end());
  loop.make = [&, by_guard = by_guard] { return make(by_guard, !by_guard); };
  loop.make_twin = [&] { return make(false, false); };
  loop.look = [&stages = stages](DistributedModel<GuardedNet>& model) {
    std::set<std::string> want, got;
    for (size_t i = 0; i < stages.size(); ++i) {
      if (stages[i] == pp_rank()) want.insert("layer" + std::to_string(i));
    }
    for (const auto& [name, tensor] : model.local_named_parameters()) got.insert(name.substr(0, name.find('.')));
    EXPECT_EQ(got, want) << "on pipeline rank " << pp_rank();
  };
  tests::expect_as_in_a_loop<GuardedNet>(loop, tests::train_once);
}

INSTANTIATE_TEST_SUITE_P(Layers, Placed,
                         testing::Values(Placement{{0, 0, 1}, true}, Placement{{0, 1, 1}, false}, Placement{{1, 1, 0}, true},
                                         Placement{{1, 0}, false}, Placement{{0, 1, 0, 1}, true},
                                         Placement{{2, 0, 1}, false}),
                         [](const auto& test) {
                           std::string name = test.param.by_guard ? "guard" : "set_partition";
                           for (const int stage : test.param.stages) name.append("_").append(std::to_string(stage));
                           return name;
                         });

}  // namespace
}  // namespace smp
