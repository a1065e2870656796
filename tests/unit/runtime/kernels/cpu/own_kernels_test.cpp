// Our kernel gives LibTorch's bits, and leaves its generator where LibTorch does.
#include "runtime/kernels/cpu/own_kernels.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>

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

TEST(OwnKernel, IsUnknownOfOtherOperators) {
  EXPECT_EQ(own_kernel_of(find("aten::bernoulli_", "Tensor")), nullptr);
  EXPECT_EQ(own_kernel_of(find("aten::native_batch_norm", "")), nullptr);
}

}  // namespace
}  // namespace smp::runtime
