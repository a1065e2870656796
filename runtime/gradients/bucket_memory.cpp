// Copies, one for each gradient: there are small ones by the hundred.
#include "runtime/gradients/bucket_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/libtorch/finite.h"
#include "runtime/libtorch/sole_owner.h"

namespace smp::runtime {
namespace {

/// What sums over replicas are made of: a view of the gradient, or of its complex numbers as pairs.
at::Tensor reals(const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(gradient.layout() == at::kStrided,
                              "gradients: expected dense ones, which replicas can add up, got ", gradient.toString(), " ",
                              gradient.sizes(), ". Make dense ones (sparse=false of an embedding).");
  return gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
}

int64_t num_reals(const at::Tensor& parameter) { return parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(); }

/// Nobody else has the gradient or a part of its memory, and each element has its own.
bool is_all_its_own(const at::Tensor& gradient) {
  return owns_all_of_its_memory(gradient) && gradient.is_non_overlapping_and_dense() && !gradient.is_neg() &&
         !gradient.is_conj();
}

}  // namespace

bool BucketMemory::has_room_for(const at::Tensor& parameter, int64_t most_bytes) const {
  const int64_t num_all = num_gradients_ + num_reals(parameter);
  return dtype() == c10::toRealValueType(parameter.scalar_type()) &&
         num_all * static_cast<int64_t>(c10::elementSize(dtype())) <= most_bytes;
}

void BucketMemory::add(size_t number, const at::Tensor& parameter) {
  numbers_.push_back(number);
  parameters_.push_back(parameter);
  num_gradients_ += num_reals(parameter);
}

at::Tensor BucketMemory::new_flat(int64_t num_elements) const {
  return at::empty({num_elements}, parameters_.front().options().dtype(dtype()).requires_grad(false));
}

void BucketMemory::pack(const at::Tensor& flat) const {
  at::Tensor all_flags = flags(flat).fill_(1);
  const Device& device = device_holding(flat);
  auto* const begin = static_cast<char*>(memory_of(flat).data);
  char* next = begin;
  for (size_t k = 0; k < parameters_.size(); ++k) {
    const at::Tensor& parameter = parameters_[k];
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) all_flags.select(0, static_cast<int64_t>(k)).zero_();
    const bool is_plain = gradient.defined() && gradient.layout() == at::kStrided &&
                          gradient.scalar_type() == parameter.scalar_type() && gradient.is_contiguous() &&
                          !gradient.is_neg() && !gradient.is_conj();
    if (is_plain) {
      device.copy(next, data_of(gradient), static_cast<int64_t>(gradient.nbytes()));
    } else {
      at::Tensor part = flat.narrow(0, (next - begin) / flat.element_size(), num_reals(parameter));
      gradient.defined() ? part.copy_(reals(gradient).reshape({-1})) : part.zero_();
    }
    if (nonfinite_ != nullptr && lane_ == nullptr && !is_finite(gradient)) nonfinite_->push_back(numbers_[k]);
    next += num_reals(parameter) * flat.element_size();
  }
}

at::Tensor BucketMemory::norms() const {
  if (nonfinite_ == nullptr || lane_ == nullptr) return {};
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& parameter : parameters_) {
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  }
  return gradients.empty() ? at::Tensor() : norms_of(gradients);
}

// The gradients are still this replica's own.
void BucketMemory::look_at(const float* norms, int64_t num_norms) const {
  for (size_t k = 0; k < parameters_.size(); ++k) {
    const at::Tensor& gradient = parameters_[k].grad();
    if (!gradient.defined()) continue;
    TORCH_INTERNAL_ASSERT(num_norms-- > 0, "a gradient came while its bucket was away");
    if (!std::isfinite(*norms++) && !is_finite(gradient)) nonfinite_->push_back(numbers_[k]);
  }
}

std::function<void(int64_t first, int64_t num_elements)> BucketMemory::divider(const at::Tensor& flat, int divisor) const {
  return [flat, divisor, end = num_gradients_](int64_t first, int64_t num_elements) {
    const int64_t num_gradients = std::min(first + num_elements, end) - first;
    if (num_gradients > 0) flat.narrow(0, first, num_gradients).div_(divisor);
  };
}

void BucketMemory::unpack(const at::Tensor& means, const at::Tensor& flags, Backward backward) {
  const auto* const data = static_cast<const char*>(data_of(means));
  const auto read = [&](int64_t first, const at::Tensor& to) {
    const DeviceMemory memory = memory_of(to);
    device_holding(to).copy(memory.data, data + first * means.element_size(), memory.num_bytes);
  };
  unpack(read, flags, backward);
}

void BucketMemory::unpack(const Read& read, const at::Tensor& flags, Backward backward) {
  const JoinAtEnd behind(lane_);
  const at::Tensor on_host = flags.to(host().type, at::kDouble);
  const auto* num_replicas = static_cast<const double*>(data_of(on_host));
  int64_t first = 0;
  for (at::Tensor& parameter : parameters_) {
    const int64_t begin = std::exchange(first, first + num_reals(parameter));
    if (*num_replicas++ == 0) continue;
    // Into a new tensor where somebody else has the old one, or the rest of the backward still reads its memory.
    // (partitioner/memory/leaving_gradients.h counts a new one always.)
    const at::Tensor& own = parameter.grad();
    const bool stays = backward == Backward::kIsOver && lane_ == nullptr && is_all_its_own(own);
    at::Tensor mean = stays ? own : at::empty_like(own.defined() ? own : parameter.detach());
    if (lane_ != nullptr) lane_->share(mean.storage());
    const bool is_plain = mean.is_contiguous() && c10::toRealValueType(mean.scalar_type()) == dtype();
    const at::Tensor numbers = is_plain ? mean : new_flat(num_reals(mean));
    if (mean.numel() > 0) read(begin, numbers);
    if (!is_plain) reals(mean).copy_(numbers.view_as(reals(mean)));
    parameter.mutable_grad() = std::move(mean);
  }
}

}  // namespace smp::runtime
