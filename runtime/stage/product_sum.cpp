// Sums in the kernel of the product.
#include "runtime/stage/product_sum.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace smp::runtime {
namespace {

constexpr int64_t kMostNumbers = int64_t{1} << 22;
// Kernels treat what is left over at the edges otherwise, and of few numbers all may round alike by chance: a trial looks at
// several hundred of whatever part of a product that has such sides.
constexpr int64_t kMultiple = 8, kFewNumbers = int64_t{1} << 16;
constexpr int kTrialsOfFew = 8, kTrialsOfMany = 2;

bool is_plain_matrix(const std::array<int64_t, 2>& strides) {
  return (strides[0] == 1 && strides[1] > 0) || (strides[1] == 1 && strides[0] > 0);
}

bool adds_up_alike(const ProductForm& form) {
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowAutograd without_autograd;
  const at::Generator generator = at::detail::createCPUGenerator(0);
  const auto random = [&](int64_t rows, int64_t columns, const std::array<int64_t, 2>& strides) {
    return at::empty_strided({rows, columns}, strides, form.dtype).uniform_(-1, 1, generator);
  };
  const int64_t count = form.rows * form.columns;
  for (int trial = 0; trial < (count <= kFewNumbers ? kTrialsOfFew : kTrialsOfMany); ++trial) {
    const at::Tensor left = random(form.rows, form.inner, form.left_strides);
    const at::Tensor right = random(form.inner, form.columns, form.right_strides);
    const int64_t offset = trial % 2;  // kernels may look at where memory begins
    const at::Tensor memory = at::empty({offset + count}, form.dtype).uniform_(-1, 1, generator);
    at::Tensor sum = memory.narrow(0, offset, count).view({form.rows, form.columns});
    const at::Tensor expected = at::mm(left, right).add_(sum);
    at::addmm_out(sum, sum, left, right);
    if (std::memcmp(sum.const_data_ptr(), expected.const_data_ptr(), sum.nbytes()) != 0) return false;
  }
  return true;
}

}  // namespace

bool product_adds_up_alike(const ProductForm& form) {
  const bool is_known_kind = form.dtype == at::kFloat || form.dtype == at::kDouble;
  const int64_t longest = std::max({form.rows, form.inner, form.columns});
  const int64_t shortest = std::min({form.rows, form.inner, form.columns});
  const int64_t middle = std::max(std::min(form.rows, form.inner), std::min(std::max(form.rows, form.inner), form.columns));
  const bool has_size = shortest > 0 && longest <= kMostNumbers / middle && form.rows % kMultiple == 0 && form.columns % kMultiple == 0;
  if (!is_known_kind || !has_size || !is_plain_matrix(form.left_strides) || !is_plain_matrix(form.right_strides)) return false;
  static std::mutex mutex;
  static std::map<std::pair<ProductForm, int>, bool> tried;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = tried.try_emplace({form, at::get_num_threads()});
  if (is_new) entry->second = adds_up_alike(form);
  return entry->second;
}

bool add_product_to_grad(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right) {
  at::Tensor& sum = const_cast<at::Tensor&>(parameter).mutable_grad();
  const bool is_plain = sum.defined() && sum.layout() == at::kStrided && sum.device().is_cpu() && sum.is_contiguous() &&
                        sum.scalar_type() == left.scalar_type() && !sum.requires_grad() && !sum.is_neg() && sum.dim() == 2 &&
                        sum.size(0) == left.size(0) && sum.size(1) == right.size(1);
  if (!is_plain || sum.storage().is_alias_of(left.storage()) || sum.storage().is_alias_of(right.storage())) return false;
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (accumulator && !accumulator->post_hooks().empty()) return false;
  at::addmm_out(sum, sum, left, right);
  return true;
}

}  // namespace smp::runtime
