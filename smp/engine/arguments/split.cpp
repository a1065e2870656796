// Splitting of step arguments.
#include "smp/engine/arguments/split.h"

#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <memory>
#include <string>

#include "runtime/device/device.h"
#include "runtime/libtorch/memory_tensor.h"

namespace smp::engine {
namespace {

constexpr auto kAlignment = static_cast<size_t>(runtime::Device::kAlignment);

using step_internal::Share;
using step_internal::StepTensor;

void check_data(const at::Tensor& tensor, int64_t position) {
  TORCH_CHECK_VALUE(runtime::is_within_reach(tensor) && tensor.layout() == at::kStrided, "step argument ", position,
                    ": expected a dense CPU tensor",
                    runtime::this_ranks_device().type == runtime::host().type ? "" : ", or one ",
                    runtime::this_ranks_device().type == runtime::host().type ? "" : "of the rank's device", ", got ",
                    tensor.defined() ? tensor.toString() : "an undefined one", ".");
  TORCH_CHECK_VALUE(!tensor.requires_grad(), "step argument ", position,
                    ": expected data, got a tensor that requires a gradient, which would be lost. detach() it.");
}

std::string describe(const Share& share) {
  const std::string microbatches = "microbatches=" + std::to_string(share.microbatches);
  return share.replicas == 1 ? microbatches : std::to_string(share.replicas) + " replicas x " + microbatches;
}

void check_cut(const StepTensor& argument, const Share& share) {
  const at::Tensor& tensor = argument.tensor;
  TORCH_CHECK_VALUE(tensor.dim() > 0, "step argument ", argument.position,
                    ": expected a tensor with a batch dimension, got a scalar. Pass numbers as numbers, let the body "
                    "capture them, or name the argument in StepOptions::non_split_inputs.");
  const int64_t axis = axis_of(argument);
  TORCH_CHECK_VALUE(axis >= 0 && axis < tensor.dim(), "step argument ", argument.position,
                    ": input_split_axes: expected a dimension of -", tensor.dim(), " ... ", tensor.dim() - 1, " for sizes ",
                    tensor.sizes(), ", got ", argument.axis, ".");
  TORCH_CHECK_VALUE(tensor.size(axis) > 0, "step argument ", argument.position,
                    ": expected a batch of rows, got none (sizes ", tensor.sizes(), ", cut along dimension ", axis,
                    "). Leave an empty batch out on all ranks, or name an ",
                    "argument that is no batch in StepOptions::non_split_inputs.");
  TORCH_CHECK_VALUE(tensor.size(axis) % share.total() == 0, "microbatch split of step argument ", argument.position,
                    axis == 0 ? std::string() : " along dimension " + std::to_string(axis),
                    ": expected a batch size divisible by ", describe(share), ", got ", tensor.size(axis),
                    ". Drop the last batch (DataLoaderOptions::drop_last) or change Config::microbatches.");
}

void check_argument(const StepTensor& argument, const Share& share) {
  for (const at::Tensor& piece : argument.pieces) check_data(piece, argument.position);
  if (!argument.pieces.empty()) return;
  check_data(argument.tensor, argument.position);
  if (!argument.is_whole) check_cut(argument, share);
}

bool is_dense(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

// By way of pinned memory of our own: nobody waits for the device, and the caller may write to the argument again when the
// step has returned.
at::Tensor on_this_ranks_device(const at::Tensor& tensor) {
  if (runtime::is_on_this_ranks_device(tensor)) return tensor;
  const at::Tensor staged = at::empty_like(tensor.detach(), tensor.options().requires_grad(false).pinned_memory(true));
  staged.copy_(tensor.detach());
  return staged.to(runtime::this_ranks_device().current(), tensor.scalar_type(), /*non_blocking=*/true);
}

// All of a tensor, in its own memory where that is aligned.
at::Tensor whole(const at::Tensor& argument) {
  const at::Tensor tensor = on_this_ranks_device(argument);
  const bool is_aligned = reinterpret_cast<uintptr_t>(runtime::data_of(tensor)) % kAlignment == 0;
  return is_dense(tensor) && is_aligned ? tensor.detach() : tensor.detach().clone();
}

// Parts of one dense argument. They lie in its own memory where that leaves each of them aligned, else in one new block:
// an allocation and a dispatched copy for each would cost more than all the rest of a microbatch's bookkeeping.
std::vector<at::Tensor> cut_dense(const at::Tensor& argument, int64_t microbatches) {
  std::vector<int64_t> sizes = argument.sizes().vec();
  sizes[0] /= microbatches;
  const auto strides = c10::contiguous_strides(sizes);
  const size_t bytes = argument.nbytes() / static_cast<size_t>(microbatches);
  const runtime::Device& device = runtime::device_holding(argument);
  auto* source = static_cast<char*>(const_cast<void*>(runtime::data_of(argument)));
  size_t pitch = bytes;
  char* first = source;
  std::shared_ptr<const void> holder;
  if ((reinterpret_cast<uintptr_t>(source) | bytes) % kAlignment == 0) {
    holder = std::make_shared<const at::Tensor>(argument);
  } else {
    pitch = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    auto block = std::make_shared<const c10::DataPtr>(device.allocate(static_cast<int64_t>(pitch) * microbatches));
    first = static_cast<char*>(block->get());
    for (size_t m = 0; m < static_cast<size_t>(microbatches); ++m) {
      device.copy(first + m * pitch, source + m * bytes, static_cast<int64_t>(bytes));
    }
    holder = std::move(block);
  }
  std::vector<at::Tensor> parts;
  parts.reserve(static_cast<size_t>(microbatches));
  for (size_t m = 0; m < static_cast<size_t>(microbatches); ++m) {
    parts.push_back(runtime::tensor_on(device, first + m * pitch, sizes, strides, argument.scalar_type(), holder));
  }
  return parts;
}

std::vector<at::Tensor> cut_strided(const at::Tensor& argument, int64_t axis, int64_t microbatches) {
  const int64_t rows = argument.size(axis) / microbatches;
  std::vector<at::Tensor> parts;
  for (int64_t m = 0; m < microbatches; ++m) parts.push_back(argument.narrow(axis, m * rows, rows).clone());
  return parts;
}

// What is cut further: the replica's part.
at::Tensor own_rows(const StepTensor& argument, const Share& share) {
  if (share.replicas == 1) return argument.tensor;
  const int64_t axis = axis_of(argument), rows = argument.tensor.size(axis) / share.replicas;
  return argument.tensor.narrow(axis, share.replica * rows, rows);
}

std::vector<at::Tensor> parts_of(const StepTensor& argument, const Share& share) {
  const int64_t microbatches = share.microbatches;
  std::vector<at::Tensor> parts;
  for (const at::Tensor& piece : argument.pieces) parts.push_back(whole(piece));
  if (!parts.empty()) return parts;
  if (argument.is_whole) return std::vector<at::Tensor>(static_cast<size_t>(microbatches), whole(argument.tensor));
  const int64_t axis = axis_of(argument);
  const at::Tensor own = on_this_ranks_device(own_rows(argument, share));
  return axis == 0 && is_dense(own) ? cut_dense(own, microbatches) : cut_strided(own, axis, microbatches);
}

}  // namespace

int64_t axis_of(const StepTensor& argument) {
  const int64_t dim = argument.tensor.dim();
  return argument.axis < 0 ? argument.axis + dim : argument.axis;
}

std::vector<std::vector<at::Tensor>> split_arguments(const std::vector<StepTensor>& arguments, const Share& share) {
  for (const StepTensor& argument : arguments) check_argument(argument, share);
  std::vector<std::vector<at::Tensor>> split(static_cast<size_t>(share.microbatches));
  for (const StepTensor& argument : arguments) {
    auto parts = parts_of(argument, share);
    for (size_t m = 0; m < split.size(); ++m) split[m].push_back(std::move(parts[m]));
  }
  return split;
}

}  // namespace smp::engine
