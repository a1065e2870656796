// One tensor under several names of the module: it lives, trains and is saved as one.
#include <gtest/gtest.h>

#include <mutex>
#include <set>
#include <sstream>

#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_close;
using tests::rows;
using tests::run_smp_ranks;

struct PartImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return linear(x) * scale; }
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(8, 8));
  at::Tensor scale = register_buffer("scale", torch::full({8}, 0.5));
};
TORCH_MODULE(Part);

/// first - part - middle | part - last, or only the second use of `part`, which has the names "a" and "b".
struct SharedNet : torch::nn::Module {
  explicit SharedNet(bool reads_it_twice) : reads_twice(reads_it_twice) {}
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = torch::tanh(first(x));
    if (reads_twice) hidden = torch::tanh(part(hidden));
    hidden = torch::tanh(before(torch::tanh(middle(hidden))));
    return last(torch::tanh(part(hidden)));
  }
  void place(int last_stage) {
    for (auto& layer : {first, middle}) set_partition(*layer, 0);
    for (auto& layer : {before, last}) set_partition(*layer, last_stage);
  }
  bool reads_twice;
  Part part;
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(8, 8));
  Part a = register_module("a", part), b = register_module("b", part);
  torch::nn::Linear before = register_module("before", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 8));
};

std::vector<at::Tensor> unique_parameters(const torch::nn::Module& module) {
  std::vector<at::Tensor> tensors;
  std::set<const void*> seen;
  for (const at::Tensor& tensor : module.parameters()) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) tensors.push_back(tensor);
  }
  return tensors;
}

std::shared_ptr<SharedNet> make_shared_net(bool reads_twice, uint64_t seed = 3) {
  auto net = std::make_shared<SharedNet>(reads_twice);
  net->to(at::kDouble);
  tests::fill(*net, seed);
  return net;
}

// Clipped hard, so that a tensor that is clipped twice shows.
void train_both(DistributedModel<SharedNet>& model, SharedNet& twin) {
  const double rate = 0.5, max_norm = 0.05;
  DistributedOptimizer optimizer(torch::optim::SGD(unique_parameters(*model.module()), rate), model);
  torch::optim::SGD eager_optimizer(unique_parameters(twin), rate);
  auto step = tests::training_step(model);
  for (int s = 0; s < 3; ++s) {
    const at::Tensor data = rows(4, 8, 10 + s, at::kDouble), target = rows(4, 8, 20 + s, at::kDouble);
    optimizer.zero_grad();
    eager_optimizer.zero_grad();
    step(data, target);
    tests::eager_step(twin, data, target, 2);
    const double want = torch::nn::utils::clip_grad_norm_(unique_parameters(twin), max_norm);
    EXPECT_NEAR(clip_grad_norm_(model, max_norm), want, 1e-12 * want) << "step " << s;
    optimizer.step();
    eager_optimizer.step();
  }
}

struct Case {
  int ranks;
  bool reads_twice;
};

class SharedNames : public testing::TestWithParam<Case> {};

TEST_P(SharedNames, TrainAndSaveLikeOneProcess) {
  std::mutex mutex;
  run_smp_ranks(GetParam().ranks, {.microbatches = 2}, [&] {
    const bool reads_twice = GetParam().reads_twice;
    const auto net = make_shared_net(reads_twice), twin = make_shared_net(reads_twice);
    net->place(pp_size() - 1);
    if (!reads_twice) set_partition(*net->part, pp_size() - 1);
    DistributedModel<SharedNet> model(net);
    train_both(model, *twin);
    const StateDict state = model.state_dict();
    const std::lock_guard<std::mutex> lock(mutex);
    std::stringstream file;
    torch::save(state, file);
    auto plain = make_shared_net(reads_twice, 77);
    torch::load(plain, file);
    auto entry = state.entries.begin();
    for (const auto& named : {twin->named_parameters(), twin->named_buffers()}) {
      for (const auto& item : named) {
        EXPECT_EQ(entry->name, item.key());
        expect_close(entry->tensor, item.value(), 1e-12, item.key() + " in state_dict()");
        ++entry;
      }
    }
    EXPECT_EQ(entry, state.entries.end());
    for (const auto& item : plain->named_parameters()) {
      expect_close(item.value(), twin->named_parameters()[item.key()], 1e-12, item.key() + " loaded");
    }
    EXPECT_TRUE(state.at("a.linear.weight").is_same(state.at("b.linear.weight")));
  });
}

TEST_P(SharedNames, AreLocalOnceUnderTheFirst) {
  run_smp_ranks(GetParam().ranks, {.microbatches = 2}, [&] {
    const auto net = make_shared_net(GetParam().reads_twice);
    net->place(pp_size() - 1);
    DistributedModel<SharedNet> model(net);
    const auto expect_once = [&](const char* when) {
      std::set<const void*> seen;
      for (const auto& [name, tensor] : model.local_named_parameters()) {
        EXPECT_NE(name.substr(0, 2), "b.") << when;
        EXPECT_TRUE(seen.insert(tensor.unsafeGetTensorImpl()).second) << when << ": " << name;
      }
    };
    expect_once("before the first step");
    auto step = tests::training_step(model);
    step(rows(4, 8, 1, at::kDouble), rows(4, 8, 2, at::kDouble));
    expect_once("after the first step");
  });
}

// The second use of `part` is fed by the last stage and feeds it, so with two reads the tensor lives twice.
TEST(SharedNames, ReadOnTwoStagesLiveOnBoth) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    const auto net = make_shared_net(true);
    net->place(1);
    DistributedModel<SharedNet> model(net);
    auto step = tests::training_step(model);
    step(rows(4, 8, 1, at::kDouble), rows(4, 8, 2, at::kDouble));
    std::set<std::string> local;
    for (const auto& [name, tensor] : model.local_named_parameters()) local.insert(name);
    EXPECT_TRUE(local.contains("a.linear.weight")) << "pipeline rank " << pp_rank();
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, SharedNames,
                         testing::Values(Case{1, true}, Case{2, true}, Case{3, true}, Case{1, false}, Case{2, false},
                                         Case{3, false}),
                         [](const auto& test) {
                           return std::to_string(test.param.ranks) + (test.param.reads_twice ? "_read_twice" : "_read_once");
                         });

}  // namespace
}  // namespace smp
