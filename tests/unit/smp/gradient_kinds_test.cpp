// Gradients that are complex or sparse, on one pipeline and over replicas.
#include <gtest/gtest.h>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::rows;
using tests::run_smp_ranks;

struct Waves : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor spectrum = torch::matmul(torch::complex(first(x), x), filter) + offset;
    return last(torch::cat({torch::real(spectrum), torch::imag(spectrum)}, 1));
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  at::Tensor filter = register_parameter("filter", torch::zeros({8, 6}, at::kComplexFloat));
  at::Tensor offset = register_parameter("offset", torch::zeros({6, 1}, at::kComplexFloat).t());
  torch::nn::Linear last = register_module("last", torch::nn::Linear(12, 4));
};

std::shared_ptr<Waves> make_waves() {
  auto net = std::make_shared<Waves>();
  const at::NoGradGuard no_grad;
  const at::Generator numbers = tests::generator(5);
  for (const at::Tensor& parameter : net->parameters()) {
    (parameter.is_complex() ? at::view_as_real(parameter) : parameter).normal_(0, 0.5, numbers);
  }
  return net;
}

at::Tensor batch(int replica, int step) { return rows(4, 8, 10 * replica + step); }

// The mean over two replicas is one sum and one half: the same bits in any order.
void expect_means_of_complex_gradients(int ranks, const ModelOptions& options, bool has_hook) {
  run_smp_ranks(ranks, {.pipeline_parallel_degree = ranks / 2, .microbatches = 1}, [&] {
    const auto net = make_waves(), twin = make_waves();
    DistributedModel model(net, options);
    if (has_hook) {
      model.register_comm_hook([](const GradientBucket& bucket) {
        EXPECT_FALSE(bucket.gradients.is_complex());
        return all_reduce_mean(bucket.gradients, CommGroup::DP_GROUP);
      });
    }
    DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
    torch::optim::SGD eager(twin->parameters(), 0.1);
    auto step = smp::step([&](at::Tensor data) { model.backward(model(data).square().mean()); });
    for (int s = 0; s < 3; ++s) {
      optimizer.zero_grad(), eager.zero_grad();
      step(batch(dp_rank(), s));
      for (const int replica : {0, 1}) (twin->forward(batch(replica, s)).square().mean()).backward();
      for (at::Tensor& parameter : twin->parameters()) parameter.mutable_grad().div_(2);
      const double want = torch::nn::utils::clip_grad_norm_(twin->parameters(), 0.5);
      EXPECT_EQ(clip_grad_norm_(model, 0.5), want);
      optimizer.step(), eager.step();
      tests::expect_twins(model, *twin, "step " + std::to_string(s));
    }
  });
}

TEST(ComplexGradients, AreAveragedOverReplicas) {
  for (const int ranks : {2, 4}) {
    for (const bool overlaps : {true, false}) {
      for (const bool has_hook : {false, true}) {
        expect_means_of_complex_gradients(ranks, {.overlapping_allreduce = overlaps}, has_hook);
      }
    }
  }
}

struct Words : torch::nn::Module {
  explicit Words(bool sparse)
      : table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(9, 8).sparse(sparse)))) {}
  at::Tensor forward(const at::Tensor& ids) { return last(torch::tanh(first(table(ids)))); }
  torch::nn::Embedding table;
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
};

std::shared_ptr<Words> make_words(bool sparse) {
  auto net = std::make_shared<Words>(sparse);
  tests::fill(*net);
  return net;
}

at::Tensor ids(int step) { return torch::tensor({1, 3, 3, 7, 0, 3, 8, step}); }

template <class Optimizer>
void expect_sparse_training_as_in_plain_libtorch(int ranks) {
  run_smp_ranks(ranks, {.microbatches = 2}, [] {
    const auto net = make_words(true), twin = make_words(true);
    DistributedModel model(net);
    DistributedOptimizer optimizer(Optimizer(net->parameters(), 0.1), model);
    Optimizer eager(twin->parameters(), 0.1);
    auto step = smp::step([&](at::Tensor words) { model.backward(model(words).square().mean()); });
    for (int s = 0; s < 5; ++s) {
      optimizer.zero_grad(), eager.zero_grad();
      step(ids(s));
      for (const auto& part : support::split_batch({ids(s)}, 2)) twin->forward(part[0]).square().mean().div(2).backward();
      optimizer.step(), eager.step();
      const auto want = twin->named_parameters();
      for (const auto& [name, parameter] : model.local_named_parameters()) {
        EXPECT_EQ(parameter.grad().is_sparse(), name == "table.weight");
        expect_bit_equal(parameter.grad().to_dense(), want[name].grad().to_dense(), "gradient of " + name);
        expect_bit_equal(parameter, want[name], name);
      }
    }
  });
}

TEST(SparseGradients, TrainOnePipelineAsInPlainLibTorch) {
  for (const int ranks : {1, 2, 3}) {
    expect_sparse_training_as_in_plain_libtorch<torch::optim::SGD>(ranks);
    expect_sparse_training_as_in_plain_libtorch<torch::optim::Adagrad>(ranks);
  }
}

TEST(SparseGradients, AreRefusedByReplicasBeforeAnythingHappens) {
  for (const int ranks : {2, 4}) {
    run_smp_ranks(ranks, {.pipeline_parallel_degree = ranks / 2, .microbatches = 1}, [] {
      const auto net = make_words(true);
      DistributedModel model(net);
      auto step = smp::step([&](at::Tensor words) { model.backward(model(words).square().mean()); });
      const std::string text = message_of([&] { step(ids(1)); });
      EXPECT_TRUE(contains(text, "aten::embedding with a sparse one for 'table.weight'")) << text;
      EXPECT_FALSE(model.partitioned() || net->last->weight.grad().defined());
      net->table->weight.set_requires_grad(false);
      step(ids(1));
      net->table->weight.set_requires_grad(true);
      net->table->options.sparse(false);
      step(ids(1));
    });
  }
}

}  // namespace
}  // namespace smp
