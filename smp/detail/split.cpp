// Splitting of step arguments.
#include "smp/detail/split.h"

#include <c10/util/Exception.h>

namespace smp::detail {
namespace {

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

}  // namespace

std::vector<std::vector<at::Tensor>> split_arguments(const std::vector<at::Tensor>& arguments, int64_t microbatches) {
  for (size_t i = 0; i < arguments.size(); ++i) check_argument(arguments[i], i, microbatches);
  std::vector<std::vector<at::Tensor>> split(static_cast<size_t>(microbatches));
  for (int64_t m = 0; m < microbatches; ++m) {
    for (const at::Tensor& argument : arguments) {
      const int64_t rows = argument.size(0) / microbatches;
      split[static_cast<size_t>(m)].push_back(argument.narrow(0, m * rows, rows).clone());
    }
  }
  return split;
}

}  // namespace smp::detail
