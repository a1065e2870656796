// Models without values on ranks: what trains, what is held, what is loaded, and what is refused.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "examples/common/tensor_memory.h"
#include "runtime/device/random.h"
#include "runtime/libtorch/unmade.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"
#include "tests/unit/smp/seeded_net.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using support::ZooModel;
using tests::rows;
using tests::run_smp_ranks;
using tests::seeded;
using tests::SmallNet;
constexpr int64_t kMib = int64_t{1} << 20;

ZooModel delayed(ZooModel model) {
  model.make = [make = model.make](uint64_t seed) {
    const DelayParamInitialization delay;
    return make(seed);
  };
  return model;
}

class DelayedOn : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, DelayedOn, testing::Values(1, 2, 3, 4));

TEST_P(DelayedOn, TrainsTheZooLikeTheUnsplitModels) {
  Config config{.microbatches = 2};
  config.seed = support::kSplitBaseSeed;
  for (const ZooModel& model : support::model_zoo()) {
    const support::OracleResult whole = support::run_unsplit(model, 2);
    run_smp_ranks(GetParam(), config, [&] {
      const support::OracleResult mine = support::run_split(delayed(model));
      support::OracleResult want = whole;
      std::erase_if(want.gradients, [&](const auto& item) { return !mine.gradients.contains(item.first); });
      support::expect_same_step(mine, want, model.name);
    });
  }
}

/// `layers` of 4 MiB each.
struct LargeNet : torch::nn::Module {
  explicit LargeNet(int count) {
    for (int i = 0; i < count; ++i) layers->push_back(torch::nn::Linear(1024, 1024));
    register_module("layers", layers);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& layer : *layers) x = torch::tanh(layer->as<torch::nn::Linear>()->forward(x));
    return x;
  }
  torch::nn::ModuleList layers;
};

TEST_P(DelayedOn, HoldsNoMoreThanTheLocalParametersAndAPartOfADraw) {
  run_smp_ranks(GetParam(), {.microbatches = 1}, [] {
    examples::TensorMemory memory;
    const auto net = seeded<LargeNet>(true, 8);
    EXPECT_LE(memory.peak_bytes(), kMib) << "while constructing";
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data).sum(); });
    const at::NoGradGuard no_grad;
    step(rows(2, 1024, 1));
    int64_t local = 0;
    for (const at::Tensor& parameter : model.local_parameters()) local += static_cast<int64_t>(parameter.nbytes());
    EXPECT_EQ(local < 30 * kMib, pp_size() > 1);
    EXPECT_LE(memory.peak_bytes(), local + kMib) << "until the end of the first step";
    EXPECT_GE(memory.current_bytes(), local);
  });
}

template <class Optimizer, class Options>
void expect_same_training(int ranks, Options options, bool constructs_in_scope = false) {
  const at::Tensor data = rows(8, 8, 1), target = rows(8, 4, 2);
  std::map<std::string, at::Tensor> trained[2];
  std::mutex mutex;
  for (const bool delayed : {false, true}) {
    run_smp_ranks(ranks, {.microbatches = 2}, [&] {
      const auto net = seeded<SmallNet>(delayed);
      DistributedModel model(net);
      std::optional<DelayParamInitialization> scope(delayed && constructs_in_scope);
      DistributedOptimizer optimizer(Optimizer(net->parameters(), options), model);
      scope.reset();
      auto step = tests::training_step(model);
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        step(data, target);
        optimizer.step();
      }
      for (const auto& [name, parameter] : model.local_named_parameters()) {
        const std::lock_guard<std::mutex> lock(mutex);
        trained[delayed][name] = parameter.detach().clone();
      }
    });
  }
  EXPECT_EQ(trained[0].size(), 8U);
  expect_bit_equal(trained[1], trained[0], "trained");
}

TEST_P(DelayedOn, TrainsWithEveryOptimizer) {
  expect_same_training<torch::optim::SGD>(GetParam(), torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_same_training<torch::optim::AdamW>(GetParam(), torch::optim::AdamWOptions(0.01));
  expect_same_training<torch::optim::RMSprop>(GetParam(), torch::optim::RMSpropOptions(0.01));
  expect_same_training<torch::optim::Adagrad>(GetParam(), torch::optim::AdagradOptions(0.01));
  expect_same_training<torch::optim::Adagrad>(GetParam(), torch::optim::AdagradOptions(0.01),
                                              /*constructs_in_scope=*/true);
}

std::map<std::string, at::Tensor> by_name(const StateDict& state) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& entry : state.entries) tensors[entry.name] = entry.tensor;
  return tensors;
}

TEST_P(DelayedOn, GathersItsStateBeforeTheFirstStep) {
  run_smp_ranks(GetParam(), {.microbatches = 1}, [] {
    const auto eager = seeded<SmallNet>(false), net = seeded<SmallNet>(true);
    DistributedModel expected(eager), model(net);
    expect_bit_equal(by_name(model.state_dict()), by_name(expected.state_dict()), "state");
    expect_bit_equal(by_name(model.local_state_dict()), by_name(expected.local_state_dict()), "local state");
    EXPECT_TRUE(runtime::is_unmade(net->first->weight)) << "nothing stays";
  });
}

TEST_P(DelayedOn, LoadsAStateBeforeTheFirstStep) {
  const auto other = tests::make_net();  // with other values
  StateDict all;
  for (const auto& item : other->named_parameters()) all.entries.push_back({item.key(), item.value().detach(), false});
  run_smp_ranks(GetParam(), {.microbatches = 1}, [&] {
    const auto net = seeded<SmallNet>(true);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    StateDict part = all;
    part.entries.erase(part.entries.begin());
    model.load_state_dict(part, /*strict=*/false);
    EXPECT_TRUE(runtime::is_unmade(net->fourth->weight)) << "the values wait";
    EXPECT_EQ(
        support::message_of<c10::ValueError>([&] { model.state_dict(); }).find("state of a model: expected a step after"),
        0U);
    EXPECT_FALSE(support::message_of<c10::ValueError>([&] { model.local_state_dict(); }).empty());
    const at::NoGradGuard no_grad;
    step(rows(2, 8, 1));
    const auto eager = seeded<SmallNet>(false);
    for (const auto& [name, tensor] : by_name(model.state_dict())) {
      const auto& source = name == all.entries[0].name ? *eager : *other;
      expect_bit_equal(tensor, source.named_parameters()[name].detach(), name);
    }
  });
}

TEST_P(DelayedOn, LoadsForAllWhereOneRankHasItsValuesAlready) {
  const auto other = tests::make_net();
  StateDict all;
  for (const auto& item : other->named_parameters()) all.entries.push_back({item.key(), item.value().detach(), false});
  run_smp_ranks(GetParam(), {.microbatches = 1}, [&] {
    const auto net = seeded<SmallNet>(true);
    if (rank() == 0) initialize_parameters(*net);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    model.load_state_dict(all);
    const at::NoGradGuard no_grad;
    step(rows(2, 8, 1));
    for (const auto& [name, tensor] : by_name(model.state_dict())) {
      expect_bit_equal(tensor, other->named_parameters()[name].detach(), name);
    }
  });
}

/// Forward uses a tensor that is not registered.
struct MaskedNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) { return last(torch::tanh(first(x)) * mask); }
  at::Tensor mask = torch::bernoulli(torch::full({8}, 0.5));
};

TEST_P(DelayedOn, MayUseUnregisteredTensorsAndReadOnceTheyArePlaced) {
  const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
  std::vector<double> losses[2];
  for (const bool delayed : {false, true}) {
    run_smp_ranks(GetParam(), {.microbatches = 2}, [&] {
      const auto net = seeded<MaskedNet>(delayed);
      DistributedModel model(net);
      bool reads = true;
      auto step = smp::step([&](at::Tensor x, at::Tensor y) {
        at::Tensor loss = torch::mse_loss(model(x), y);
        if (reads && loss.item<double>() < 1e9) loss = loss * 2;
        if (reads) losses[delayed].push_back(loss.item<double>());
        model.backward(loss);
        return loss;
      });
      if (delayed) {
        const std::string text = support::message_of<c10::Error>([&] { step(data, target); });
        EXPECT_NE(text.find("to read no values in its body"), std::string::npos) << text;
        EXPECT_FALSE(model.partitioned());
      }
      reads = false;
      step(data, target);
      reads = true;
      losses[delayed].clear();
      step(data, target);
    });
  }
  EXPECT_EQ(losses[0].size(), 2U);
  EXPECT_EQ(losses[0], losses[1]);
}

TEST(DelayedInitialisation, TrainsAndLoadsOnReplicas) {
  const auto other = tests::make_net();
  StateDict part;
  part.entries.push_back({"second.weight", other->second->weight.detach(), false});
  const at::Tensor data = rows(8, 8, 1), target = rows(8, 4, 2);
  std::map<std::string, at::Tensor> trained[2];
  for (const bool delayed : {false, true}) {
    run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [&] {
      const auto net = seeded<SmallNet>(delayed);
      DistributedModel model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), 0.1), model);
      auto step = tests::training_step(model);
      // Only the first replica's state counts.
      model.load_state_dict(dp_rank() == 0 ? part : StateDict{}, /*strict=*/false);
      for (int i = 0; i < 2; ++i) {
        optimizer.zero_grad();
        step(data.chunk(2)[dp_rank()].clone(), target.chunk(2)[dp_rank()].clone());
        optimizer.step();
      }
      const auto state = by_name(model.state_dict());
      if (rank() == 3) trained[delayed] = state;
    });
  }
  EXPECT_EQ(trained[0].size(), 8U);
  expect_bit_equal(trained[1], trained[0], "trained");
}

TEST(DelayedInitialisation, KnowsPartitionGuardsAroundAndWithin) {
  run_smp_ranks(3, {.microbatches = 1}, [] {
    std::shared_ptr<SmallNet> net;
    torch::nn::Linear around{nullptr}, within{nullptr};
    {
      const runtime::UserRandomStateScope user;
      const runtime::GeneratorHold guard(17);
      {
        const PartitionGuard on_stage(2);
        const DelayParamInitialization delay;
        around = torch::nn::Linear(8, 8);
      }
      const DelayParamInitialization delay;
      net = std::make_shared<SmallNet>();
      const PartitionGuard on_stage(1);
      within = torch::nn::Linear(8, 8);
    }
    EXPECT_TRUE(runtime::is_unmade(around->weight) && runtime::is_unmade(within->weight));
    net->first = net->replace_module("first", within);
    net->third = net->replace_module("third", around);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    const at::NoGradGuard no_grad;
    step(rows(2, 8, 1));
    for (const auto& [name, parameter] : model.local_named_parameters()) {
      EXPECT_TRUE(name.find("first") == std::string::npos || pp_rank() == 1) << name;
      EXPECT_TRUE(name.find("third") == std::string::npos || pp_rank() == 2) << name;
    }
  });
}

TEST(DelayedInitialisation, GoesOnInASecondScope) {
  const auto eager = seeded<SmallNet>(false), net = seeded<SmallNet>(true);
  {
    const DelayParamInitialization delay;
    torch::nn::init::constant_(net->first->weight, 3);
    const at::NoGradGuard no_grad;
    net->second->weight.mul_(2).add_(net->third->weight);
  }
  initialize_parameters(*net);
  expect_bit_equal(net->first->weight.detach(), torch::full({8, 8}, 3.0), "first");
  expect_bit_equal(net->second->weight.detach(), (eager->second->weight * 2 + eager->third->weight).detach(), "second");
}

TEST(DelayedInitialisation, RefusesReadsOfValuesThatDoNotExist) {
  const auto net = seeded<SmallNet>(true);
  for (const auto& read : std::vector<std::function<void()>>{
           [&] { net->first->weight.sum(); }, [&] { net->first->weight.data_ptr<float>(); },
           [&] { torch::nn::init::ones_(net->first->weight); }, [&] { net->to(torch::kDouble); },
           [&] { net->forward(torch::ones({2, 8})); }, [&] { std::ostringstream() << net->first->bias; }}) {
    const std::string message = support::message_of<c10::Error>(read);
    EXPECT_NE(message.find("expected a tensor with values, got one made by aten::empty under delayed initialisation"),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("initialize_parameters(module)"), std::string::npos) << message;
  }
  initialize_parameters(*net);
  net->forward(torch::ones({2, 8}));
}

TORCH_LIBRARY(smp_delayed_test, library) {
  library.def("twice(Tensor x) -> Tensor", [](const at::Tensor& x) { return x * 2; });
}

at::Tensor twice(const at::Tensor& x) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("smp_delayed_test::twice", "");
  return op.typed<at::Tensor(const at::Tensor&)>().call(x);
}

TEST(DelayedInitialisation, RefusesWhatItCannotRecord) {
  const auto old = seeded<SmallNet>(true), older = seeded<SmallNet>(true);
  at::Tensor real_indices = torch::empty({3}, torch::kLong);
  const std::pair<const char*, std::function<void()>> cases[] = {
      {"aten::nonzero: expected operators whose sizes do not depend on values", [] { torch::ones({4}).nonzero(); }},
      {"aten::resize_: expected operators that make or fill tensors", [] { torch::ones({4}).resize_({9}); }},
      {"expected a tensor with values, got one made by aten::zeros",
       [] {
         auto zeros = torch::zeros({4});
         zeros.accessor<float, 1>()[0] = 1;
       }},
      {"smp_delayed_test::twice: expected operators of LibTorch", [] { twice(torch::ones({4})); }},
      {"aten::max: expected all results that are written to to be of the",
       [&] {
         auto values = torch::empty({3});
         torch::max_out(values, real_indices, torch::rand({3, 4}), 1);
       }},
      {"sparse and quantized tensors cannot be captured", [] { torch::ones({4, 4}).to_sparse(); }},
      {"aten::_conj: expected tensors without a lazy sign", [] { torch::ones({4}, torch::kComplexFloat).conj(); }},
      {"expected dense tensors under", [] { torch::empty({4, 4}, torch::TensorOptions(torch::kSparse)); }},
      {"expected the tensors of one smp::DelayParamInitialization scope, got those of two",
       [&] { torch::cat({old->first->bias, older->first->bias}); }},
      {"expected construction without autocast",
       [] {
         at::autocast::set_autocast_enabled(at::kCPU, true);
         try {
           torch::ones({4});
         } catch (...) {
           at::autocast::set_autocast_enabled(at::kCPU, false);
           throw;
         }
       }},
  };
  for (const auto& [text, construct] : cases) {
    const DelayParamInitialization delay;
    const std::string message = support::message_of<c10::Error>(construct);
    EXPECT_NE(message.find(text), std::string::npos) << text << "\n" << message;
  }
}

TEST(DelayedInitialisation, AndStepsExcludeEachOther) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = seeded<SmallNet>(true);
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    const at::Tensor data = rows(2, 8, 1);
    {
      const DelayParamInitialization delay;
      const std::string message = support::message_of<c10::ValueError>([&] { step(data); });
      EXPECT_EQ(message.find("step: expected all smp::DelayParamInitialization scopes to end before"), 0U) << message;
    }
    auto constructing = smp::step([&](at::Tensor x) {
      const DelayParamInitialization delay;
      return model(x);
    });
    const std::string message = support::message_of<c10::ValueError>([&] { constructing(data); });
    EXPECT_NE(message.find("DelayParamInitialization: expected a call outside of step bodies"), std::string::npos)
        << message;
    step(data);
  });
}

}  // namespace
}  // namespace smp
