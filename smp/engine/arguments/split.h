// Cutting step arguments into microbatches. Owns no state.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "smp/step_call.h"

namespace smp::engine {

/// result[m][argument]: equal parts along the argument's axis, its own pieces, or all of it, each aligned like a tensor of
/// its own, because kernels take other ways through misaligned data, with other bits: on the argument's memory where that is
/// so anyway, copies elsewhere. Who writes to a part copies it first. Checks every argument before it copies any. Throws
/// c10::ValueError for axes that a tensor does not have, scalars and sizes that share.total() does not divide where they are
/// to be cut, tensors that require a gradient, and tensors that are not dense, on the rank's device or on the host: from
/// there they are moved.
std::vector<std::vector<at::Tensor>> split_arguments(const std::vector<step_internal::StepTensor>& arguments,
                                                     const step_internal::Share& share);

/// The dimension along which the tensor is cut, counted from 0.
int64_t axis_of(const step_internal::StepTensor& argument);

}  // namespace smp::engine
