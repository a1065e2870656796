// The Mersenne Twister of LibTorch's generator, a state at a time.
#include "runtime/kernels/cpu/dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>

// Compiled for machines with and without wide vectors; which one runs is decided when the program is loaded, by code that
// runs before ThreadSanitizer's, and would call that.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define SMP_WIDE_VECTORS __attribute__((target_clones("default", "avx2")))
#else
#define SMP_WIDE_VECTORS
#endif

namespace smp::runtime {
namespace {

// (Matsumoto & Nishimura, ACM TOMACS 1998) In loops of constant length over parts that do not depend on each other, which
// compilers turn into vector instructions.
using State = std::array<uint32_t, at::MERSENNE_STATE_N>;
constexpr size_t kSize = at::MERSENNE_STATE_N, kShift = at::MERSENNE_STATE_M;

uint32_t twisted(uint32_t high, uint32_t low) {
  const uint32_t mixed = (high & 0x80000000U) | (low & 0x7fffffffU);
  return (mixed >> 1) ^ ((0U - (low & 1U)) & 0x9908b0dfU);
}

SMP_WIDE_VECTORS void advance(State& state) {
  for (size_t j = 0; j < kSize - kShift; ++j) state[j] = state[j + kShift] ^ twisted(state[j], state[j + 1]);
  for (size_t j = kSize - kShift; j < kSize - 1; ++j) state[j] = state[j + kShift - kSize] ^ twisted(state[j], state[j + 1]);
  state[kSize - 1] = state[kShift - 1] ^ twisted(state[kSize - 1], state[0]);
}

SMP_WIDE_VECTORS void temper(const State& state, State& numbers) {
  for (size_t j = 0; j < kSize; ++j) {
    uint32_t bits = state[j];
    bits ^= bits >> 11;
    bits ^= (bits << 7) & 0x9d2c5680U;
    bits ^= (bits << 15) & 0xefc60000U;
    numbers[j] = bits ^ (bits >> 18);
  }
}

// As at::bernoulli_distribution<double>: 53 bits of two numbers, as a fraction of 2^53 below p or not. Both sides of the
// comparison are scaled by 2^53, which is exact.
SMP_WIDE_VECTORS void compare(const State& numbers, double p, std::array<float, kSize / 2>& is_below) {
  const auto limit = static_cast<uint64_t>(std::ceil(p * static_cast<double>(uint64_t{1} << 53)));
  const auto ordered = [](uint32_t bits) { return static_cast<int32_t>(bits ^ 0x80000000U); };  // as signed ones are
  const auto high_limit = static_cast<int32_t>(limit >> 32);
  const int32_t low_limit = ordered(static_cast<uint32_t>(limit));
  for (size_t j = 0; j < kSize / 2; ++j) {
    const auto high = static_cast<int32_t>(numbers[2 * j] & 0x1fffffU);
    const int32_t low = ordered(numbers[2 * j + 1]);
    is_below[j] = static_cast<float>(static_cast<int>(high < high_limit) |
                                     (static_cast<int>(high == high_limit) & static_cast<int>(low < low_limit)));
  }
}

template <class T>
void fill(T* mask, int64_t count, double p, at::mt19937& engine) {
  auto data = engine.data();
  State numbers;
  std::array<float, kSize / 2> is_below;
  const auto prepare = [&] {
    temper(data.state_, numbers);
    compare(numbers, p, is_below);
  };
  prepare();
  while (count > 0) {
    if (data.left_ == 1) {  // the engine counts down before it draws
      advance(data.state_);
      prepare();
      data.left_ = static_cast<int>(kSize) + 1;
      data.next_ = 0;
    }
    const int64_t taken = std::min<int64_t>(count, (data.left_ - 1) / 2);
    const float* first = is_below.data() + data.next_ / 2;
    std::copy(first, first + taken, mask);
    mask += taken;
    count -= taken;
    data.next_ += static_cast<uint32_t>(2 * taken);
    data.left_ -= static_cast<int>(2 * taken);
  }
  engine.set_data(data);
}

bool fill_with(at::Tensor& mask, double p, const at::Generator& generator) {
  const bool is_probability = p >= 0 && p <= 1;
  if (!is_probability || !mask.device().is_cpu() || mask.layout() != at::kStrided || !mask.is_contiguous()) return false;
  auto* own = at::check_generator<at::CPUGeneratorImpl>(generator);
  const std::lock_guard<std::mutex> lock(own->mutex_);
  at::mt19937 engine = own->engine();
  if (engine.data().next_ % 2 != 0) return false;  // both numbers of a pair are from one state
  if (mask.scalar_type() == at::kFloat) {
    fill(mask.mutable_data_ptr<float>(), mask.numel(), p, engine);
  } else if (mask.scalar_type() == at::kBFloat16) {
    fill(mask.mutable_data_ptr<c10::BFloat16>(), mask.numel(), p, engine);
  } else {
    return false;
  }
  own->set_engine(engine);
  return true;
}

// LibTorch can be built to draw with generators of MKL.
bool draws_alike() {
  const at::Generator theirs = at::detail::createCPUGenerator(0), ours = at::detail::createCPUGenerator(0);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t count : {5, 1000, 243, 312}) {  // within a state, over several, up to the end of one, all of one
      const double p = 0.1 + 3.0 / static_cast<double>(count);
      at::Tensor expected = at::empty({count}, dtype), got = at::empty({count}, dtype);
      expected.bernoulli_(p, theirs);
      if (!fill_with(got, p, ours) || !got.equal(expected)) return false;
    }
  }
  return at::Tensor(theirs.unsafeGetGeneratorImpl()->get_state())
      .equal(at::Tensor(ours.unsafeGetGeneratorImpl()->get_state()));
}

}  // namespace

bool fill_bernoulli(at::Tensor& mask, double p) {
  static const bool is_alike = draws_alike();
  return is_alike && fill_with(mask, p, at::detail::getDefaultCPUGenerator());
}

void bernoulli_in_place(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  enum : size_t { kSelf, kProbability, kGenerator };
  at::Tensor& self = stack[kSelf].toTensor();
  if (!stack[kGenerator].isNone() || !fill_bernoulli(self, stack[kProbability].toDouble())) return op.callBoxed(stack);
  stack.resize(1);
}

}  // namespace smp::runtime
