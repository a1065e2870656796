// Two models, two optimizers and two step functions in one program: a GAN, against the same loop without smp.
#include <gtest/gtest.h>

#include <functional>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::expect_twins;
using tests::fill;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

struct Generator : torch::nn::Module {
  at::Tensor forward(const at::Tensor& noise) { return out(torch::relu(norm(in(noise)))); }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(4, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(8, 8));
};

struct Critic : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return out(torch::leaky_relu(in(x), 0.2)); }
  torch::nn::Linear in = register_module("in", torch::nn::Linear(8, 8));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(8, 1));
};

template <class Net>
std::shared_ptr<Net> filled(uint64_t seed) {
  auto net = std::make_shared<Net>();
  fill(*net, seed);
  return net;
}

/// The bodies of a GAN, on models of ours and on plain modules.
template <class G, class C, class Backward>
at::Tensor critic_body(G& generator, C& critic, const Backward& backward, const at::Tensor& real, const at::Tensor& noise) {
  const at::Tensor fake = generator(noise).detach();
  const at::Tensor loss = torch::softplus(-critic(real)).mean() + torch::softplus(critic(fake)).mean();
  backward(loss);
  return loss;
}
template <class G, class C, class Backward>
at::Tensor generator_body(G& generator, C& critic, const Backward& backward, const at::Tensor& noise) {
  const at::Tensor loss = torch::softplus(-critic(generator(noise))).mean();
  backward(loss);
  return loss;
}

constexpr int kMicrobatches = 2;

/// The same training without smp; one call per microbatch.
struct PlainGan {
  std::shared_ptr<Generator> generator = filled<Generator>(5);
  std::shared_ptr<Critic> critic = filled<Critic>(6);
  torch::optim::Adam generator_optimizer{generator->parameters(), torch::optim::AdamOptions(0.01)};
  torch::optim::SGD critic_optimizer{critic->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)};

  std::vector<at::Tensor> losses(const std::vector<at::Tensor>& batch) {
    auto make = [&](const at::Tensor& x) { return generator->forward(x); };
    auto judge = [&](const at::Tensor& x) { return critic->forward(x); };
    const auto backward = [](const at::Tensor& loss) { loss.div(kMicrobatches).backward(); };
    std::vector<at::Tensor> losses;
    for (const auto& part : support::split_batch(batch, kMicrobatches)) {
      losses.push_back((batch.size() == 2 ? critic_body(make, judge, backward, part[0], part[1])
                                          : generator_body(make, judge, backward, part[0]))
                           .detach());
    }
    return losses;
  }
};

class SeveralModels : public testing::TestWithParam<int> {};

TEST_P(SeveralModels, TrainAsAGanBitForBit) {
  run_smp_ranks(GetParam(), {.microbatches = kMicrobatches}, [] {
    PlainGan plain;
    DistributedModel generator(filled<Generator>(5), {.name = "generator"});
    DistributedModel critic(filled<Critic>(6), {.name = "critic"});
    set_partition(*generator.module(), pp_size() - 1);  // else the critic's two calls may go to two ranks, whose sums round
    set_partition(*critic.module(), 0);
    DistributedOptimizer generator_optimizer(torch::optim::Adam(generator.module()->parameters(), 0.01), generator);
    DistributedOptimizer critic_optimizer(
        torch::optim::SGD(critic.module()->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)), critic);
    auto critic_step = smp::step([&](at::Tensor real, at::Tensor noise) {
      return critic_body(generator, critic, [&](const at::Tensor& loss) { critic.backward(loss); }, real, noise);
    });
    auto generator_step = smp::step([&](at::Tensor noise) {
      return generator_body(generator, critic, [&](const at::Tensor& loss) { generator.backward(loss); }, noise);
    });
    for (int s = 0; s < 4; ++s) {
      const std::string what = "step " + std::to_string(s);
      const at::Tensor real = rows(8, 8, 10 + s), noise = rows(8, 4, 20 + s);
      critic_optimizer.zero_grad();
      plain.critic_optimizer.zero_grad();
      expect_bit_equal(critic_step(real, noise).outputs(), plain.losses({real, noise}), what + ", critic");
      critic_optimizer.step();
      plain.critic_optimizer.step();
      generator_optimizer.zero_grad();
      plain.generator_optimizer.zero_grad();
      expect_bit_equal(generator_step(noise).outputs(), plain.losses({noise}), what + ", generator");
      generator_optimizer.step();
      plain.generator_optimizer.step();
      expect_twins(generator, *plain.generator, what);
      expect_twins(critic, *plain.critic, what);
    }
  });
}

TEST_P(SeveralModels, ArePlacedWhenAStepFirstUsesThem) {
  run_smp_ranks(GetParam(), {.microbatches = 1}, [] {
    DistributedModel first(make_net()), second(make_net());
    auto use_first = smp::step([&](at::Tensor data) { first.backward(first(data).mean()); });
    auto use_both = smp::step([&](at::Tensor data) {
      const at::Tensor loss = (first(data) * second(data)).mean();
      second.backward(loss);
      return loss;
    });
    const at::Tensor data = rows(4, 8, 1);
    use_first(data);
    EXPECT_TRUE(first.partitioned());
    EXPECT_FALSE(second.partitioned());
    EXPECT_EQ(second.local_parameters().size(), 8);
    first.zero_grad();
    const auto twin_of_first = make_net(), twin_of_second = make_net();
    const at::Tensor want = (twin_of_first->forward(data) * twin_of_second->forward(data)).mean();
    want.backward();
    expect_bit_equal(use_both(data)[0], want.detach(), "loss");
    EXPECT_TRUE(second.partitioned());
    expect_twins(first, *twin_of_first, "first");
    expect_twins(second, *twin_of_second, "second");
    EXPECT_TRUE(pp_size() == 1 || contains(second.plan_text(), "model1.")) << second.plan_text();
  });
}

TEST_P(SeveralModels, HaveStatesAndNormsOfTheirOwn) {
  run_smp_ranks(GetParam(), {.microbatches = 1}, [] {
    DistributedModel generator(filled<Generator>(5));
    DistributedModel critic(filled<Critic>(6));
    auto step = smp::step([&](at::Tensor noise) {
      return generator_body(generator, critic, [&](const at::Tensor& loss) { critic.backward(loss); }, noise);
    });
    step(rows(4, 4, 1));
    EXPECT_EQ(critic.state_dict().entries.size(), 4);
    EXPECT_EQ(critic.state_dict().entries[0].name, "in.weight");
    PlainGan plain;
    const auto plain_step = [&] {
      torch::softplus(-plain.critic->forward(plain.generator->forward(rows(4, 4, 1)))).mean().backward();
    };
    plain_step();
    EXPECT_EQ(clip_grad_norm_(critic, 1e9), torch::nn::utils::clip_grad_norm_(plain.critic->parameters(), 1e9));
    EXPECT_EQ(clip_grad_norm_(generator, 1e9), torch::nn::utils::clip_grad_norm_(plain.generator->parameters(), 1e9));
  });
}

TEST_P(SeveralModels, MayShareAModule) {
  run_smp_ranks(GetParam(), {.microbatches = 1}, [] {
    const auto net = make_net(), twin = make_net();
    DistributedModel first(net);
    {
      DistributedModel again(net);
      auto step = smp::step([&](at::Tensor data) { again.backward((again(data) + first(data * 2)).mean()); });
      step(rows(4, 8, 1));
      EXPECT_TRUE(first.partitioned());
    }
    auto step = smp::step([&](at::Tensor data) { first.backward(first(data).mean()); });
    first.zero_grad();
    step(rows(4, 8, 2));
    twin->forward(rows(4, 8, 2)).mean().backward();
    if (pp_size() == 1) expect_twins(first, *twin, "after the other is gone");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SeveralModels, testing::Values(1, 2, 3));

TEST(SeveralModelsRefused, OfOneName) {
  run_smp_ranks(2, {}, [] {
    DistributedModel first(make_net(), {.name = "net"});
    const auto second = [](const std::string& name) { DistributedModel model(make_net(), {.name = name}); };
    EXPECT_TRUE(contains(message_of([&] { second("net"); }), "'net' twice"));
    EXPECT_TRUE(contains(message_of([&] { second("a.b"); }), "letters, digits and underscores"));
    second("other");
  });
}

TEST(SeveralOptimizers, AreOverOneModelEach) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto generator = filled<Generator>(1);
    const auto critic = filled<Critic>(2);
    DistributedModel first(generator);
    DistributedModel second(critic);
    std::vector<at::Tensor> both = generator->parameters();
    for (const at::Tensor& parameter : critic->parameters()) both.push_back(parameter);
    const std::string text = message_of<c10::ValueError>(
        [&] { DistributedOptimizer<torch::optim::SGD> optimizer(torch::optim::SGD(both, 0.1), first); });
    EXPECT_TRUE(contains(text, "sizes [8, 8]") && contains(text, "an optimizer of its own")) << text;
  });
}

TEST(SeveralOptimizers, OfOneModelClearTheirOwnGradients) {
  run_smp_ranks(1, {.microbatches = 1}, [] {
    const auto net = make_net();
    DistributedModel model(net);
    DistributedOptimizer first(torch::optim::SGD(net->first->parameters(), 0.1), model);
    DistributedOptimizer second(torch::optim::SGD(net->second->parameters(), 0.1), model);
    auto step = tests::training_step(model);
    step(rows(4, 8, 1), rows(4, 4, 1));
    first.zero_grad();
    EXPECT_FALSE(net->first->weight.grad().defined());
    EXPECT_TRUE(net->second->weight.grad().defined());
    model.zero_grad();
    EXPECT_FALSE(net->second->weight.grad().defined());
  });
}

TEST(SeveralModelsRefused, OfAModuleThatOneHasSpread) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = make_net(), next = make_net();
    StateDict state;
    {
      DistributedModel model(net);
      tests::training_step(model)(rows(4, 8, 1), rows(4, 4, 1));
      state = model.state_dict();
    }
    const std::string text = message_of<c10::ValueError>([&] { DistributedModel model(net); });
    EXPECT_TRUE(contains(text, "'first.weight'") && contains(text, "state_dict()")) << text;
    EXPECT_THROW(DistributedModel(net->first), c10::ValueError);
    DistributedModel model(next);
    model.load_state_dict(state);
    tests::training_step(model)(rows(4, 8, 1), rows(4, 4, 1));
  });
}

TEST(SeveralModelsGo, WhereAModuleGotABufferAfterItWasWrapped) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = make_net();
    DistributedModel first(net);
    auto step = tests::training_step(first);
    step(rows(4, 8, 1), rows(4, 4, 1));
    {
      DistributedModel second(make_net());
      net->register_buffer("mask", torch::ones({8}));
    }
    step(rows(4, 8, 1), rows(4, 4, 1));
    EXPECT_TRUE(first.partitioned());
  });
}

struct Pair : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return model1->forward(x) + model2->forward(x); }
  std::shared_ptr<Critic> model1 = register_module("model1", filled<Critic>(1));
  std::shared_ptr<Critic> model2 = register_module("model2", filled<Critic>(2));
};

TEST(SeveralModelsRefused, WhoseTensorsWouldHaveOneName) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto pair = std::make_shared<Pair>();
    DistributedModel first(pair);
    const std::string text = message_of<c10::ValueError>([] { DistributedModel second(filled<Critic>(3)); });
    EXPECT_TRUE(contains(text, "'model1.in.weight'") && contains(text, "ModelOptions::name")) << text;
    DistributedModel second(filled<Critic>(3), {.name = "second"});
    DistributedModel part(pair->model1, {.name = "model1"});  // the same tensors under the same names
    const torch::NoGradGuard no_grad;
    auto step = smp::step([&](at::Tensor x) { return second(x); });
    expect_bit_equal(step(rows(4, 8, 1))[0], filled<Critic>(3)->forward(rows(4, 8, 1)), "of the second");
  });
}

}  // namespace
}  // namespace smp
