// Splitting of step arguments.
#include "smp/detail/split.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <cstring>
#include <memory>

#include "runtime/memory_tensor.h"

namespace smp::detail {
namespace {

constexpr size_t kAlignment = 64;  // of the CPU allocator's memory

void check_argument(const at::Tensor& argument, size_t index, int64_t microbatches) {
  TORCH_CHECK_VALUE(argument.defined() && argument.is_cpu() && argument.layout() == at::kStrided, "step argument ",
                    index, ": expected a dense CPU tensor, got ",
                    argument.defined() ? argument.toString() : "an undefined one", ".");
  TORCH_CHECK_VALUE(argument.dim() > 0, "step argument ", index,
                    ": expected a tensor with a batch dimension, got a scalar. Pass numbers as numbers, or let the "
                    "body capture them.");
  TORCH_CHECK_VALUE(argument.size(0) > 0 && argument.size(0) % microbatches == 0, "microbatch split of step argument ",
                    index, ": expected a batch size divisible by microbatches=", microbatches, ", got ",
                    argument.size(0), ". Drop the last batch (DataLoaderOptions::drop_last) or change ",
                    "Config::microbatches.");
  TORCH_CHECK_VALUE(!argument.requires_grad(), "step argument ", index,
                    ": expected data, got a tensor that requires a gradient, which would be lost. detach() it.");
}

// Parts of one dense argument. They lie in its own memory where that leaves each of them aligned, else in one new block:
// an allocation and a dispatched copy for each would cost more than all the rest of a microbatch's bookkeeping.
std::vector<at::Tensor> cut_dense(const at::Tensor& argument, int64_t microbatches) {
  std::vector<int64_t> sizes = argument.sizes().vec();
  sizes[0] /= microbatches;
  const auto strides = c10::contiguous_strides(sizes);
  const size_t bytes = argument.nbytes() / static_cast<size_t>(microbatches);
  auto* source = static_cast<char*>(const_cast<void*>(argument.const_data_ptr()));
  size_t pitch = bytes;
  char* first = source;
  std::shared_ptr<const void> holder;
  if ((reinterpret_cast<uintptr_t>(source) | bytes) % kAlignment == 0) {
    holder = std::make_shared<const at::Tensor>(argument);
  } else {
    pitch = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    const size_t all_bytes = pitch * static_cast<size_t>(microbatches);
    auto block = std::make_shared<const c10::DataPtr>(c10::GetCPUAllocator()->allocate(all_bytes));
    first = static_cast<char*>(block->get());
    for (size_t m = 0; m < static_cast<size_t>(microbatches) && bytes > 0; ++m) {
      std::memcpy(first + m * pitch, source + m * bytes, bytes);
    }
    holder = std::move(block);
  }
  std::vector<at::Tensor> parts;
  parts.reserve(static_cast<size_t>(microbatches));
  for (size_t m = 0; m < static_cast<size_t>(microbatches); ++m) {
    parts.push_back(runtime::tensor_on(first + m * pitch, sizes, strides, argument.scalar_type(), holder));
  }
  return parts;
}

std::vector<at::Tensor> cut_strided(const at::Tensor& argument, int64_t microbatches) {
  const int64_t rows = argument.size(0) / microbatches;
  std::vector<at::Tensor> parts;
  for (int64_t m = 0; m < microbatches; ++m) parts.push_back(argument.narrow(0, m * rows, rows).clone());
  return parts;
}

}  // namespace

std::vector<std::vector<at::Tensor>> split_arguments(const std::vector<at::Tensor>& arguments, int64_t microbatches) {
  for (size_t i = 0; i < arguments.size(); ++i) check_argument(arguments[i], i, microbatches);
  std::vector<std::vector<at::Tensor>> split(static_cast<size_t>(microbatches));
  for (const at::Tensor& argument : arguments) {
    const bool is_dense = argument.is_contiguous() && !argument.is_conj() && !argument.is_neg();
    auto parts = is_dense ? cut_dense(argument, microbatches) : cut_strided(argument, microbatches);
    for (size_t m = 0; m < split.size(); ++m) split[m].push_back(std::move(parts[m]));
  }
  return split;
}

}  // namespace smp::detail
