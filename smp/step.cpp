// What is checked of step functions whatever their types.
#include "smp/step.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "smp/engine/engine.h"

namespace smp::step_internal {
namespace {

bool stays_whole(const StepOptions& options, int64_t position) {
  const auto& whole = options.non_split_inputs;
  return std::find(whole.begin(), whole.end(), position) != whole.end();
}

void check_position(const char* option, int64_t position, int64_t num_arguments) {
  TORCH_CHECK_VALUE(position < num_arguments, "step: ", option, ": expected positions below ", num_arguments,
                    ", the number of arguments, got ", position, ". Arguments are counted from 0.");
}

}  // namespace

Results run(int step_number, const Call& call) { return engine::call_step(step_number, call); }

void refuse_structure(size_t m) {
  TORCH_CHECK_VALUE(false,
                    "step: expected the body to return the same sizes of containers, keys of maps and filled optionals for "
                    "every microbatch, got others for microbatch ",
                    m, " than for 0. Return a tensor of zeros where there is nothing to return.");
}

void check_options(const StepOptions& options) {
  TORCH_CHECK_VALUE(options.detach_outputs,
                    "step: detach_outputs: expected true, got false. Results are on every rank, and the graph behind them "
                    "is not: what needs it belongs into the body.");
  for (const int64_t position : options.non_split_inputs) {
    TORCH_CHECK_VALUE(position >= 0, "step: non_split_inputs: expected positions from 0, got ", position, ".");
  }
  for (const auto& [position, axis] : options.input_split_axes) {
    TORCH_CHECK_VALUE(position >= 0, "step: input_split_axes: expected positions from 0, got ", position, ".");
    TORCH_CHECK_VALUE(!stays_whole(options, position), "step: expected argument ", position, " in non_split_inputs or in ",
                      "input_split_axes, got it in both. Remove one.");
  }
}

std::vector<Cut> cuts_of(const StepOptions& options, int64_t num_arguments) {
  for (const int64_t position : options.non_split_inputs) check_position("non_split_inputs", position, num_arguments);
  for (const auto& [position, axis] : options.input_split_axes) {
    check_position("input_split_axes", position, num_arguments);
  }
  std::vector<Cut> cuts;
  for (int64_t i = 0; i < num_arguments; ++i) {
    const auto axis = options.input_split_axes.find(i);
    cuts.push_back({i, axis == options.input_split_axes.end() ? 0 : axis->second, stays_whole(options, i)});
  }
  return cuts;
}

void refuse_slices(int64_t position, size_t expected, size_t got, int64_t microbatch) {
  TORCH_CHECK_VALUE(false, "step argument ", position,
                    ": expected smp_slice to return the same number of tensors for every ", "microbatch, got ", expected,
                    " for microbatch 0 and ", got, " for ", microbatch, ".");
}

void refuse_whole(int64_t position) {
  TORCH_CHECK_VALUE(false, "step argument ", position, ": expected an object whose smp_slice returns its own type, got one ",
                    "that returns another and is named in non_split_inputs. Let the body capture it instead.");
}

}  // namespace smp::step_internal

int64_t smp::num_graphs() { return engine::num_graphs(); }
