// Whether tensors hold NaN or infinity.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace smp::runtime {

/// True for an undefined tensor. Takes one pass over its memory: a sum that is finite has finite
/// terms. Only where it is not, each element is looked at, because sums may overflow.
bool is_finite(const at::Tensor& tensor);
/// Of dense tensors of one device, in float32 and beside one another: what is not finite is that of a tensor that is not, or
/// whose squares are too large. Waits for no device.
at::Tensor norms_of(const std::vector<at::Tensor>& tensors);
/// All of them, with one answer to wait for where a device is not the host.
bool are_finite(const std::vector<at::Tensor>& tensors);

}  // namespace smp::runtime
