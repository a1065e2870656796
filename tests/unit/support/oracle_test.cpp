// The oracle and the zoo hold what every split run is measured against, so they are checked on their own.
#include "tests/support/oracle.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include "runtime/capture/interceptor.h"
#include "runtime/device/random.h"
#include "tests/support/bits.h"
#include "tests/support/model_zoo.h"
#include "tests/support/random_graph.h"

namespace smp::support {
namespace {

constexpr int64_t kBatch = 40;

OracleResult fresh_step(const ZooModel& model, int microbatches, RandomOptions random) {
  auto module = model.make(/*seed=*/3);
  return run_oracle(model, *module, model.make_inputs(kBatch, /*seed=*/5), microbatches, random,
                    /*training=*/true);
}

at::Tensor user_random_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

class Zoo : public testing::TestWithParam<ZooModel> {
  void SetUp() override { at::set_num_threads(1); }
};

// Random graphs hold dead branches, so this is for the models that a person wrote.
class WrittenModel : public Zoo {};

// Neither batch norm nor a loss that compares the rows of a batch.
class IndependentRows : public Zoo {};

TEST_P(WrittenModel, EveryReachedParameterGetsAFiniteNonZeroGradient) {
  auto step = fresh_step(GetParam(), 1, {.base_seed = 11});
  const auto& without = GetParam().without_gradient;
  for (const auto& [name, gradient] : step.gradients) {
    bool reached = std::find(without.begin(), without.end(), name) == without.end();
    EXPECT_EQ(gradient.defined(), reached) << name;
    if (!gradient.defined()) continue;
    EXPECT_TRUE(at::isfinite(gradient).all().item<bool>()) << name;
    EXPECT_GT(gradient.abs().max().item<double>(), 0.0) << name;
  }
  for (const auto& loss : step.losses) EXPECT_TRUE(std::isfinite(loss.item<double>()));
}

TEST_P(Zoo, TwoRunsAreBitEqual) {
  for (int microbatches : {1, 2, 5, 8}) {
    auto first = fresh_step(GetParam(), microbatches, {.base_seed = 11});
    auto second = fresh_step(GetParam(), microbatches, {.base_seed = 11});
    ASSERT_EQ(first.losses.size(), static_cast<size_t>(microbatches));
    expect_same_step(second, first, GetParam().name);
  }
}

TEST_P(Zoo, RandomNumbersFollowSeedStepAndMicrobatch) {
  auto base = fresh_step(GetParam(), 2, {.base_seed = 11, .step = 4});
  const RandomOptions others[] = {
      {.base_seed = 12, .step = 4}, {.base_seed = 11, .step = 5}, {.base_seed = 11, .step = 4, .first_microbatch = 2}};
  for (const auto& other : others) {
    auto step = fresh_step(GetParam(), 2, other);
    EXPECT_EQ(bit_difference(step.losses[0], base.losses[0]).empty(), !GetParam().has_random);
  }
}

TEST_P(IndependentRows, MicrobatchCountChangesNothing) {
  // Evaluation mode switches dropout off; gradients are wanted all the same.
  auto model = GetParam();
  auto without_dropout = [&](int microbatches) {
    auto module = model.make(3);
    auto wrapped = model;
    wrapped.forward = [&](torch::nn::Module& net, const std::vector<at::Tensor>& in) {
      net.eval();
      return model.forward(net, in);
    };
    return run_oracle(wrapped, *module, model.make_inputs(kBatch, 5), microbatches, {}, true);
  };
  auto one = without_dropout(1);
  for (int microbatches : {2, 5}) {
    auto several = without_dropout(microbatches);
    for (const auto& [name, gradient] : one.gradients) {
      // Zero in exact arithmetic, such as a bias before a norm that removes it: only rounding to compare.
      if (!gradient.defined() || gradient.abs().max().item<double>() < 1e-7) continue;
      expect_close(several.gradients.at(name), gradient, 1e-5, name);
    }
  }
}

TEST_P(Zoo, EvaluationLeavesNoGradientAndNoChangedBuffer) {
  auto module = GetParam().make(3);
  auto before = copy_buffers(*module);
  auto step = run_oracle(GetParam(), *module, GetParam().make_inputs(kBatch, 5), 2, {}, false);
  for (const auto& [name, gradient] : step.gradients) EXPECT_FALSE(gradient.defined()) << name;
  expect_bit_equal(step.buffers, before, "buffer");
  EXPECT_FALSE(step.losses[0].requires_grad());
}

TEST_P(Zoo, ATrainingStepLeavesTheUsersRandomStateAlone) {
  auto before = user_random_state();
  fresh_step(GetParam(), 2, {.base_seed = 11});
  expect_bit_equal(user_random_state(), before, "random state");
}

TEST_P(Zoo, SeedDecidesParametersAndInputs) {
  auto parameters = [&](uint64_t seed) {
    std::map<std::string, at::Tensor> result;
    for (auto& p : GetParam().make(seed)->named_parameters()) result[p.key()] = p.value();
    return result;
  };
  expect_bit_equal(parameters(3), parameters(3), "parameter");
  auto one = parameters(3), other = parameters(4);
  EXPECT_TRUE(std::any_of(one.begin(), one.end(),
                          [&](const auto& entry) { return !bit_difference(other.at(entry.first), entry.second).empty(); }));
  expect_bit_equal(GetParam().make_inputs(kBatch, 5), GetParam().make_inputs(kBatch, 5), "input");
  EXPECT_NE(bit_difference(GetParam().make_inputs(kBatch, 6)[0], GetParam().make_inputs(kBatch, 5)[0]), "");
}

TEST_P(Zoo, TiedWeightsAreDeclared) {
  auto module = GetParam().make(3);
  std::set<const void*> distinct;
  for (auto& p : module->parameters()) distinct.insert(p.unsafeGetTensorImpl());
  const bool one_tensor_has_two_names = distinct.size() != module->parameters().size();
  EXPECT_TRUE(!one_tensor_has_two_names || GetParam().has_tied_weights);
}

std::string case_name(const testing::TestParamInfo<ZooModel>& info) { return info.param.name; }

std::vector<ZooModel> models_with_independent_rows() {
  std::vector<ZooModel> models{random_graph(1), random_graph(2), random_graph(3)};
  for (const auto& model : model_zoo()) {
    if (model.rows_are_independent) models.push_back(model);
  }
  return models;
}

INSTANTIATE_TEST_SUITE_P(All, IndependentRows, testing::ValuesIn(models_with_independent_rows()), case_name);
INSTANTIATE_TEST_SUITE_P(All, WrittenModel, testing::ValuesIn(model_zoo()), case_name);
INSTANTIATE_TEST_SUITE_P(All, Zoo, testing::ValuesIn(model_zoo()), case_name);
INSTANTIATE_TEST_SUITE_P(RandomGraphs, Zoo, testing::Values(random_graph(1), random_graph(2), random_graph(3)), case_name);

TEST(ModelZoo, NamesAreDistinctAndUnknownOnesAreRefused) {
  std::set<std::string> names;
  for (const auto& model : model_zoo()) EXPECT_TRUE(names.insert(model.name).second) << model.name;
  EXPECT_EQ(zoo_model("gpt").name, "gpt");
  EXPECT_THROW(zoo_model("no_such_model"), c10::ValueError);
}

TEST(RandomGraph, FiveHundredSeedsTrainAndDiffer) {
  at::set_num_threads(1);
  std::set<double> losses;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    auto model = random_graph(seed);
    auto module = model.make(seed);
    auto step = run_oracle(model, *module, model.make_inputs(4, seed), 2, {}, true);
    ASSERT_TRUE(std::isfinite(step.losses[0].item<double>()));
    losses.insert(step.losses[0].item<double>());
    for (const auto& [name, gradient] : step.gradients) {
      ASSERT_TRUE(!gradient.defined() || at::isfinite(gradient).all().item<bool>()) << name;
    }
  }
  EXPECT_GT(losses.size(), 490U);
}

class OperatorNames : public runtime::Interceptor {
 public:
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    names.insert(op.operator_name().name);
    op.callBoxed(stack);
  }
  std::set<std::string> names;
};

TEST(RandomGraph, TwentySeedsHoldEveryStructure) {
  OperatorNames seen;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    auto model = random_graph(seed);
    auto module = model.make(seed);
    runtime::InterceptScope scope(seen);
    model.body(*module, model.make_inputs(4, seed));
  }
  for (const char* name : {"relu_", "add_", "mul_", "chunk", "cat", "transpose", "reshape", "select", "expand", "dropout",
                           "layer_norm", "gelu", "tanh", "addmm", "matmul"}) {
    EXPECT_EQ(seen.names.count(std::string("aten::") + name), 1U) << name;
  }
}

TEST(Oracle, GradientsOfTwoStepsAddUp) {
  const auto& model = zoo_model("mlp");
  auto module = model.make(3);
  auto inputs = model.make_inputs(kBatch, 5);
  auto once = run_oracle(model, *module, inputs, 1, {}, true);
  auto twice = run_oracle(model, *module, inputs, 1, {}, true);
  for (const auto& [name, gradient] : once.gradients) {
    expect_bit_equal(twice.gradients.at(name), gradient.mul(2.0), name);
  }
}

TEST(Oracle, EachRandomOperatorOfABodyHasNumbersOfItsOwn) {
  ZooModel model = zoo_model("mlp");
  model.forward = [](torch::nn::Module&, const std::vector<at::Tensor>& in) {
    return std::vector<at::Tensor>{at::dropout(in[0], 0.5, true), at::dropout(in[0], 0.5, true)};
  };
  model.loss = [](const std::vector<at::Tensor>& out, const std::vector<at::Tensor>&) {
    return BodyResult{out[0].sum(), out};
  };
  auto module = model.make(3);
  auto step = run_oracle(model, *module, {at::ones({4, 64}).requires_grad_()}, 2, {}, true);
  EXPECT_NE(bit_difference(step.outputs[0][0], step.outputs[0][1]), "");
  EXPECT_NE(bit_difference(step.outputs[0][0], step.outputs[1][0]), "");
}

TEST(Oracle, IndivisibleBatchIsRefused) { EXPECT_THROW(split_batch({at::ones({10, 2})}, 4), c10::ValueError); }

TEST(Oracle, MicrobatchesOwnAlignedStorage) {
  for (const auto& microbatch : split_batch({at::ones({15, 3})}, 5)) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(microbatch[0].const_data_ptr()) % 64, 0U);
    EXPECT_EQ(microbatch[0].storage().nbytes(), 9 * sizeof(float));
  }
}

TEST(UserRandomState, ConcurrentScopesRestoreTheStateBeforeTheFirst) {
  auto before = user_random_state();
  auto draw = [](uint64_t ordinal) {
    runtime::UserRandomStateScope scope;
    runtime::GeneratorHold guard({}, ordinal);
    at::rand({16});
  };
  {
    runtime::UserRandomStateScope outer;
    std::thread one(draw, 1), two(draw, 2);
    one.join();
    two.join();
    EXPECT_NE(bit_difference(user_random_state(), before), "");
  }
  expect_bit_equal(user_random_state(), before, "random state");
}

TEST(Bits, DifferenceCountsElementsAndSeesSignedZeroAndNan) {
  auto zero = at::ones({3}).mul(0.0), negative = zero.neg();
  EXPECT_NE(bit_difference(negative, zero).find("3 of 3"), std::string::npos);
  auto nan = at::ones({2}).mul(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(bit_difference(nan, nan.clone()), "");
  EXPECT_EQ(bit_difference(at::Tensor(), at::Tensor()), "");
  EXPECT_NE(bit_difference(at::Tensor(), zero), "");
  EXPECT_NE(bit_difference(at::ones({2, 1}), at::ones({1, 2})), "");
  EXPECT_NE(bit_difference(at::ones({2}, at::kDouble), at::ones({2})), "");
  EXPECT_EQ(bit_difference(at::ones({2, 3}).t(), at::ones({3, 2})), "");
  EXPECT_DOUBLE_EQ(relative_difference(at::ones({2}).mul(3.0), at::ones({2}).mul(2.0)), 0.5);
  EXPECT_TRUE(std::isnan(relative_difference(nan, at::ones({2}))));
}

}  // namespace
}  // namespace smp::support
