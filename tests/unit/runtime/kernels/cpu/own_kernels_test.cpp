// Our kernels give LibTorch's bits, and leave its generator where LibTorch does.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "runtime/kernels/cpu/batch_norm.h"
#include "runtime/kernels/cpu/dropout.h"

namespace smp::runtime {
namespace {

/// The default generator, as it was before when this goes.
class Seeded {
 public:
  explicit Seeded(uint64_t seed) : before_(generator().clone()) { again(seed); }
  ~Seeded() { generator().set_state(before_.get_state()); }
  static void again(uint64_t seed) { generator().set_current_seed(seed); }
  static at::Tensor state() { return generator().get_state(); }

 private:
  static at::Generator generator() { return at::detail::getDefaultCPUGenerator(); }
  at::Generator before_;
};

TEST(FillBernoulli, DrawsTheBitsOfLibTorchAndLeavesItsStateBehind) {
  const Seeded seeded(1);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const double p : {0.0, 1e-16, 0.1, 0.25, 0.5, 0.9, 1 - 1e-16, 1.0}) {
      for (const int64_t count : {0, 1, 2, 311, 312, 313, 624, 1000, 100'000}) {
        at::Tensor expected = at::empty({count}, dtype), got = at::empty({count}, dtype);
        Seeded::again(static_cast<uint64_t>(count));
        for (int k = 0; k < 3; ++k) expected.bernoulli_(p);  // the second and third begin within a state
        const at::Tensor state = Seeded::state();
        Seeded::again(static_cast<uint64_t>(count));
        for (int k = 0; k < 3; ++k) EXPECT_TRUE(fill_bernoulli(got, p));
        EXPECT_TRUE(got.equal(expected)) << count << " of " << p;
        EXPECT_TRUE(Seeded::state().equal(state)) << count << " of " << p;
      }
    }
  }
}

// Both numbers of a pair would have to come from two states.
TEST(FillBernoulli, LeavesItToLibTorchAfterAnOddNumberOfDraws) {
  const Seeded seeded(2);
  at::empty({1}).uniform_();
  const at::Tensor state = Seeded::state();
  at::Tensor mask = at::full({5}, 7);
  EXPECT_FALSE(fill_bernoulli(mask, 0.5));
  EXPECT_TRUE(mask.eq(7).all().item<bool>());
  EXPECT_TRUE(Seeded::state().equal(state));
}

TEST(FillBernoulli, LeavesRefusalsToLibTorch) {
  at::Tensor mask = at::empty({5});
  for (const double p : {-0.1, 1.1, std::nan("")}) EXPECT_FALSE(fill_bernoulli(mask, p)) << p;
}

TEST(FillBernoulli, LeavesOtherTensorsToLibTorch) {
  const Seeded seeded(3);
  const at::Tensor state = Seeded::state();
  at::Tensor apart = at::empty({4, 6}).t(), doubles = at::empty({5}, at::kDouble), flags = at::empty({5}, at::kBool);
  for (at::Tensor* mask : {&apart, &doubles, &flags}) EXPECT_FALSE(fill_bernoulli(*mask, 0.5));
  EXPECT_TRUE(Seeded::state().equal(state));
}

/// Both ways, from the same statistics.
void expect_batch_norm_alike(const at::Tensor& input, bool has_parameters, bool has_statistics, double epsilon = 1e-5) {
  const int64_t channels = input.size(1);
  const auto vector = [&](bool is_there) { return is_there ? at::rand({channels}).add(0.5) : at::Tensor(); };
  const auto copy = [](const at::Tensor& values) { return values.defined() ? values.clone() : values; };
  const at::Tensor weight = vector(has_parameters), bias = vector(has_parameters);
  const at::Tensor mean = vector(has_statistics), var = vector(has_statistics);
  const BatchNormArguments own{input, weight, bias, copy(mean), copy(var), 0.1, epsilon};
  BatchNormResults got;
  ASSERT_TRUE(batch_norm_in_training(own, got)) << input.sizes();
  const auto [output, save_mean, save_inverse_std] =
      at::native_batch_norm(input, weight, bias, mean, var, true, 0.1, epsilon);
  EXPECT_TRUE(got.output.equal(output)) << input.sizes();
  EXPECT_TRUE(got.output.strides() == output.strides()) << input.sizes();
  EXPECT_TRUE(got.mean.equal(save_mean)) << input.sizes();
  EXPECT_TRUE(got.inverse_std.equal(save_inverse_std)) << input.sizes();
  if (!has_statistics) return;
  EXPECT_TRUE(own.running_mean.equal(mean)) << input.sizes();
  EXPECT_TRUE(own.running_var.equal(var)) << input.sizes();
}

TEST(BatchNorm, HasTheBitsOfLibTorch) {
  const Seeded seeded(6);
  const std::vector<std::vector<int64_t>> shapes = {{8, 32, 32, 32}, {8, 64, 16, 16}, {1, 8, 2, 1},  {3, 13, 5, 7},
                                                    {2, 9, 31},      {4, 2, 3, 3, 3}, {1, 100, 1, 2}};
  for (const auto& shape : shapes) {
    for (const double scale : {1e-20, 1.0, 1e15}) {
      const at::Tensor input = at::randn(shape).mul(scale).add(3 * scale);
      expect_batch_norm_alike(input, true, true);
      expect_batch_norm_alike(input, true, false);
      expect_batch_norm_alike(input, false, true);
      expect_batch_norm_alike(input, false, false, 0);
    }
  }
}

TEST(BatchNorm, HasTheBitsOfLibTorchForValuesThatDoNotVary) {
  const Seeded seeded(7);
  expect_batch_norm_alike(at::full({4, 10, 3, 3}, 2.5), true, true);
  expect_batch_norm_alike(at::full({4, 10, 3, 3}, 2.5), true, true, 0);
  expect_batch_norm_alike(at::zeros({4, 10, 3, 3}), true, true, 0);
}

TEST(BatchNorm, LeavesOtherTensorsToLibTorch) {
  const at::Tensor image = at::ones({2, 4, 3, 3});
  const auto runs = [](const at::Tensor& input, const at::Tensor& weight) {
    BatchNormResults results;
    return batch_norm_in_training({input, weight, {}, {}, {}}, results);
  };
  EXPECT_TRUE(runs(image, at::ones({4})));
  EXPECT_FALSE(runs(image.to(at::kDouble), at::ones({4}, at::kDouble)));
  EXPECT_FALSE(runs(image.to(at::kBFloat16), at::ones({4})));  // mixed
  EXPECT_FALSE(runs(image.contiguous(at::MemoryFormat::ChannelsLast), at::ones({4})));
  EXPECT_FALSE(runs(image.transpose(2, 3), at::ones({4})));   // not one after the other
  EXPECT_FALSE(runs(at::ones({6, 4}), at::ones({4})));        // no images
  EXPECT_FALSE(runs(at::ones({6, 4, 1, 1}), at::ones({4})));  // channels last as well as first
  EXPECT_FALSE(runs(at::ones({2, 1, 3, 3}), at::ones({1})));  // the same
  EXPECT_FALSE(runs(at::ones({0, 4, 3, 3}), at::ones({4})));
  EXPECT_FALSE(runs(image, at::ones({5})));  // LibTorch refuses it
  EXPECT_FALSE(runs(image, at::ones({8}).slice(0, 0, 8, 2)));
}

c10::OperatorHandle find(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
}

TEST(OwnKernel, TakesThePlaceOfTheOperatorWithAllItsArguments) {
  const Seeded seeded(4);
  const c10::OperatorHandle op = find("aten::bernoulli_", "float");
  const OwnKernel kernel = own_kernel_of(op);
  ASSERT_NE(kernel, nullptr);
  for (const at::Tensor& mask : {at::empty({40, 50}), at::empty({40, 50}).t(), at::empty({9}, at::kDouble)}) {
    const at::Tensor expected = at::empty_like(mask);
    Seeded::again(5);
    expected.bernoulli_(0.3);
    Seeded::again(5);
    torch::jit::Stack stack{mask, 0.3, c10::IValue()};
    kernel(op, stack);
    ASSERT_EQ(stack.size(), 1u);
    EXPECT_TRUE(stack.front().toTensor().is_same(mask));
    EXPECT_TRUE(mask.equal(expected));
  }
}

TEST(OwnKernel, NormalisesInTrainingAndLeavesEvaluationToLibTorch) {
  const Seeded seeded(8);
  const c10::OperatorHandle op = find("aten::native_batch_norm", "");
  const OwnKernel kernel = own_kernel_of(op);
  ASSERT_NE(kernel, nullptr);
  const at::Tensor input = at::randn({3, 10, 4, 4}), weight = at::rand({10});
  for (const bool training : {true, false}) {
    const at::Tensor mean = at::rand({10}), var = at::rand({10}), own_mean = mean.clone(), own_var = var.clone();
    const auto [output, save_mean, save_inverse_std] =
        at::native_batch_norm(input, weight, {}, mean, var, training, 0.1, 1e-5);
    torch::jit::Stack stack{input, weight, c10::IValue(), own_mean, own_var, training, 0.1, 1e-5};
    kernel(op, stack);
    ASSERT_EQ(stack.size(), 3u);
    EXPECT_TRUE(stack[0].toTensor().equal(output));
    EXPECT_TRUE(stack[1].toTensor().equal(save_mean));
    EXPECT_TRUE(stack[2].toTensor().equal(save_inverse_std));
    EXPECT_TRUE(own_mean.equal(mean));
    EXPECT_TRUE(own_var.equal(var));
  }
}

TEST(OwnKernel, IsUnknownOfOtherOperators) {
  EXPECT_EQ(own_kernel_of(find("aten::bernoulli_", "Tensor")), nullptr);
  EXPECT_EQ(own_kernel_of(find("aten::mul", "Tensor")), nullptr);
}

}  // namespace
}  // namespace smp::runtime
