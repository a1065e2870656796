// Statistics of eight channels at a time.
#include "runtime/kernels/cpu/batch_norm.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "runtime/kernels/cpu/wide_vectors.h"

namespace smp::runtime {
namespace {

/// Of the elements of one image, channels follow each other.
struct Images {
  const float* data = nullptr;
  int64_t count = 0, channels = 0, pixels = 0;
  const float* channel(int64_t image, int64_t channel) const { return data + (image * channels + channel) * pixels; }
};

/// By channel, of those from `first` on: in LibTorch's order and types, which are double for sums and float for all else.
template <size_t kWidth>
inline void add_up(const Images& images, int64_t first, float* mean, float* squares) {
  std::array<double, kWidth> sum{};
  for (int64_t n = 0; n < images.count; ++n) {
    const float* x = images.channel(n, first);
    for (int64_t i = 0; i < images.pixels; ++i) {
      for (size_t c = 0; c < kWidth; ++c) sum[c] += static_cast<double>(x[static_cast<int64_t>(c) * images.pixels + i]);
    }
  }
  std::array<float, kWidth> center;
  for (size_t c = 0; c < kWidth; ++c) {
    center[c] = static_cast<float>(sum[c] / static_cast<double>(images.count * images.pixels));
  }
  sum = {};
  for (int64_t n = 0; n < images.count; ++n) {
    const float* x = images.channel(n, first);
    for (int64_t i = 0; i < images.pixels; ++i) {
      for (size_t c = 0; c < kWidth; ++c) {
        const float distance = x[static_cast<int64_t>(c) * images.pixels + i] - center[c];
        sum[c] += static_cast<double>(distance * distance);
      }
    }
  }
  for (size_t c = 0; c < kWidth; ++c) {
    mean[first + static_cast<int64_t>(c)] = center[c];
    squares[first + static_cast<int64_t>(c)] = static_cast<float>(sum[c]);
  }
}

constexpr int64_t kTogether = 8;

SMP_WIDE_VECTORS void add_up_together(const Images& images, int64_t first, float* mean, float* squares) {
  add_up<kTogether>(images, first, mean, squares);
}

bool is_row_of(const at::Tensor& tensor, int64_t size) {
  return !tensor.defined() ||
         (tensor.device().is_cpu() && tensor.scalar_type() == at::kFloat && tensor.layout() == at::kStrided &&
          tensor.dim() == 1 && tensor.size(0) == size && tensor.is_contiguous());
}

// Images of one element, or of one channel, lie channels last as well as channels first.
bool can_run(const BatchNormArguments& arguments) {
  const at::Tensor& x = arguments.input;
  const bool is_known = x.device().is_cpu() && x.layout() == at::kStrided && x.scalar_type() == at::kFloat;
  if (!is_known || x.dim() < 3 || x.numel() == 0 || !x.is_contiguous()) return false;
  const int64_t channels = x.size(1);
  const bool has_images = x.numel() / x.size(0) / channels > 1 && channels > 1;
  return has_images && is_row_of(arguments.weight, channels) && is_row_of(arguments.bias, channels) &&
         is_row_of(arguments.running_mean, channels) && is_row_of(arguments.running_var, channels);
}

/// y = scale x + shift, rounded once. std::fma() would stay a call.
SMP_FUSED_MULTIPLY_ADD void transform(const float* x, float scale, float shift, int64_t count, float* y) {
  for (int64_t i = 0; i < count; ++i) y[i] = __builtin_fmaf(x[i], scale, shift);
}

/// Of a tensor that may be undefined.
float element_or(const at::Tensor& values, int64_t i, float otherwise) {
  return values.defined() ? values.const_data_ptr<float>()[i] : otherwise;
}

/// In the type of `now`, which is float for a mean and double for a variance.
template <class T>
void update(const at::Tensor& running, int64_t channel, float momentum, T now) {
  if (!running.defined()) return;
  float& value = running.mutable_data_ptr<float>()[channel];
  value = static_cast<float>(static_cast<T>(momentum) * now + static_cast<T>((1 - momentum) * value));
}

class Run {
 public:
  Run(const BatchNormArguments& arguments, BatchNormResults& results) : arguments_(arguments) {
    const at::Tensor& x = arguments.input;
    const int64_t channels = x.size(1);
    images_ = {x.const_data_ptr<float>(), x.size(0), channels, x.numel() / x.size(0) / channels};
    results = {at::empty_like(x), at::empty({channels}, x.options()), at::empty({channels}, x.options())};
    output_ = results.output.mutable_data_ptr<float>();
    mean_ = results.mean.mutable_data_ptr<float>();
    inverse_std_ = results.inverse_std.mutable_data_ptr<float>();
  }

  void all_channels() {
    const int64_t num_groups = (images_.channels + kTogether - 1) / kTogether;
    at::parallel_for(0, num_groups, 1, [this](int64_t begin, int64_t end) {
      for (int64_t group = begin; group < end; ++group) {
        const int64_t first = group * kTogether, last = std::min(first + kTogether, images_.channels);
        add_up_channels(first, last);
        for (int64_t c = first; c < last; ++c) finish(c);
      }
    });
  }

 private:
  // Sums of squared distances go where inverse deviations will be.
  void add_up_channels(int64_t first, int64_t last) {
    if (last - first == kTogether) return add_up_together(images_, first, mean_, inverse_std_);
    for (int64_t c = first; c < last; ++c) add_up<1>(images_, c, mean_, inverse_std_);
  }

  void finish(int64_t c) {
    const int64_t count = images_.count * images_.pixels;
    const float squares = inverse_std_[c];
    const auto variance = static_cast<double>(squares / static_cast<float>(count));
    const bool is_flat = variance == 0 && arguments_.epsilon == 0;
    inverse_std_[c] = is_flat ? 0 : static_cast<float>(1 / std::sqrt(variance + arguments_.epsilon));
    const auto momentum = static_cast<float>(arguments_.momentum);
    update(arguments_.running_mean, c, momentum, mean_[c]);
    update(arguments_.running_var, c, momentum, static_cast<double>(squares / static_cast<float>(count - 1)));
    const float scale = inverse_std_[c] * element_or(arguments_.weight, c, 1);
    const float shift = std::fma(-mean_[c], scale, element_or(arguments_.bias, c, 0));
    for (int64_t n = 0; n < images_.count; ++n) {
      const float* x = images_.channel(n, c);
      transform(x, scale, shift, images_.pixels, output_ + (x - images_.data));
    }
  }

  const BatchNormArguments& arguments_;
  Images images_;
  float* output_ = nullptr;
  float* mean_ = nullptr;
  float* inverse_std_ = nullptr;
};

at::Tensor drawn(at::IntArrayRef sizes, double mean, const at::Generator& numbers) {
  return at::empty(sizes, at::kFloat).normal_(mean, 3, numbers);
}

/// Both ways, from the same statistics.
bool adds_up_alike(int64_t channels, int64_t side, double epsilon) {
  const at::Generator numbers = at::detail::createCPUGenerator(0);
  const at::Tensor input = drawn({3, channels, side, side}, 0.7, numbers);
  const at::Tensor weight = drawn({channels}, 1, numbers), bias = drawn({channels}, 0, numbers);
  const at::Tensor mean = drawn({channels}, 0, numbers), var = drawn({channels}, 9, numbers);
  const BatchNormArguments own{input, weight, bias, mean.clone(), var.clone(), 0.37, epsilon};
  if (!can_run(own)) return false;
  BatchNormResults results;
  Run(own, results).all_channels();
  const auto [output, save_mean, save_inverse_std] =
      at::native_batch_norm(input, weight, bias, mean, var, true, 0.37, epsilon);
  return output.equal(results.output) && save_mean.equal(results.mean) && save_inverse_std.equal(results.inverse_std) &&
         mean.equal(own.running_mean) && var.equal(own.running_var);
}

bool all_add_up_alike() {
  const at::NoGradGuard no_grad;
  bool all_alike = true;
  for (const int64_t channels : {2, 8, 9}) {
    for (const int64_t side : {3, 4}) {
      for (const double epsilon : {0.0, 1e-5}) all_alike = all_alike && adds_up_alike(channels, side, epsilon);
    }
  }
  return all_alike;
}

}  // namespace

bool batch_norm_adds_up_alike() {
  static const bool all_alike = all_add_up_alike();
  return all_alike;
}

bool batch_norm_in_training(const BatchNormArguments& arguments, BatchNormResults& results) {
  if (!batch_norm_adds_up_alike() || !can_run(arguments)) return false;
  Run(arguments, results).all_channels();
  return true;
}

void own_native_batch_norm(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  enum : size_t { kInput, kWeight, kBias, kRunningMean, kRunningVar, kTraining, kMomentum, kEpsilon };
  const auto tensor = [&](size_t i) { return stack[i].isNone() ? at::Tensor() : stack[i].toTensor(); };
  BatchNormResults results;
  if (!stack[kTraining].toBool()) return op.callBoxed(stack);
  const BatchNormArguments arguments{tensor(kInput),
                                     tensor(kWeight),
                                     tensor(kBias),
                                     tensor(kRunningMean),
                                     tensor(kRunningVar),
                                     stack[kMomentum].toDouble(),
                                     stack[kEpsilon].toDouble()};
  if (!batch_norm_in_training(arguments, results)) return op.callBoxed(stack);
  stack.clear();
  torch::jit::push(stack, std::move(results.output), std::move(results.mean), std::move(results.inverse_std));
}

}  // namespace smp::runtime
