// The sweep over aten calls that compares meta tensors with real ones: its vocabulary. The calls
// themselves are in meta_kernels_*_test.cpp, one line each; meta_kernels_test.cpp runs them.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/headeronly/version.h>

#include <deque>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

namespace smp::test {

using at::Tensor;

enum class Layout { kContiguous, kChannelsLast, kTransposed };

/// Makes the inputs of a call: the same geometry on the CPU and on meta, values only on the CPU.
struct Inputs {
  at::Device device = at::kCPU;
  at::ScalarType dtype = at::kFloat;
  Layout layout = Layout::kContiguous;
  bool requires_grad = false;

  /// Floating values in [0.1, 0.7], in the layout where the number of dimensions allows it.
  Tensor f(at::IntArrayRef sizes) const;
  /// Integers in [0, high).
  Tensor i(at::IntArrayRef sizes, int64_t high = 2) const;
  Tensor b(at::IntArrayRef sizes) const;
  Tensor c(at::IntArrayRef sizes) const;
  /// A symmetric positive definite matrix.
  Tensor spd(int64_t size) const;
  /// An empty tensor for out=.
  Tensor& out() const { return kept(at::empty({0}, options())); }
  Tensor& out(at::ScalarType type) const { return kept(at::empty({0}, options().dtype(type))); }
  /// `tensor` as an argument that can be written to.
  Tensor& kept(const Tensor& tensor) const { return written.emplace_back(tensor); }
  at::TensorOptions options() const { return at::TensorOptions().device(device).dtype(dtype); }

  /// `real` on the device, in the layout.
  Tensor place(const Tensor& real) const;

  mutable std::deque<Tensor> written = {};
};

/// Newer releases have mended some of what the tests expect of this one.
inline constexpr bool kIsOldestTorch = TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11;

struct Call {
  std::string text;
  std::function<std::vector<Tensor>(const Inputs&)> run;
};

inline std::vector<Tensor> list_of(const Tensor& tensor) { return {tensor}; }
inline std::vector<Tensor> list_of(std::vector<Tensor> tensors) { return tensors; }
template <typename... Tensors>
std::vector<Tensor> list_of(const std::tuple<Tensors...>& tensors) {
  return std::apply([](const auto&... each) { return std::vector<Tensor>{each...}; }, tensors);
}

/// A call whose name is its own text; `x` is the Inputs.
#define SMP_CALL(...)                                                                            \
  ::smp::test::Call {                                                                            \
    #__VA_ARGS__, [](const ::smp::test::Inputs& x) { return ::smp::test::list_of(__VA_ARGS__); } \
  }

std::vector<Call> pointwise_calls();
std::vector<Call> network_calls();
std::vector<Call> loss_calls();
std::vector<Call> reduction_calls();
std::vector<Call> indexing_calls();

/// Number of calls that LibTorch alone runs on meta; registers the kernels afterwards, whatever the order of the tests.
int num_working_before();

class MetaKernels : public ::testing::Test {
 protected:
  void SetUp() override { num_working_before(); }
};

}  // namespace smp::test
