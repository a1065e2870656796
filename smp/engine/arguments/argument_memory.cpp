// Common memory, to the byte.
#include "smp/engine/arguments/argument_memory.h"

#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <string>

#include "runtime/device/device.h"

namespace smp::engine {

using namespace partitioner;
using step_internal::StepTensor;

namespace {

/// Addresses from the first element to the end of the last.
struct Extent {
  int64_t first, end;
};

Extent extent_of(const at::Tensor& tensor) {
  const auto first = reinterpret_cast<int64_t>(runtime::data_of(tensor));
  if (tensor.numel() == 0) return {first, first};
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

/// Which bytes of `extent` the tensor has: 1 for each.
at::Tensor bytes_of(const at::Tensor& tensor, const Extent& extent) {
  at::Tensor bytes = at::zeros({extent.end - extent.first}, at::TensorOptions(runtime::host().type).dtype(at::kByte));
  const auto width = static_cast<int64_t>(tensor.element_size());
  std::vector<int64_t> sizes = tensor.sizes().vec(), strides = tensor.strides().vec();
  for (int64_t& stride : strides) stride *= width;
  sizes.push_back(width);
  strides.push_back(1);
  bytes.as_strided(sizes, strides, extent_of(tensor).first - extent.first).fill_(1);
  return bytes;
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const Extent of_a = extent_of(a), of_b = extent_of(b);
  if (of_a.end <= of_b.first || of_b.end <= of_a.first) return false;
  const Extent both{std::min(of_a.first, of_b.first), std::max(of_a.end, of_b.end)};
  return bytes_of(a, both).mul_(bytes_of(b, both)).any().item<bool>();
}

bool shares_with_itself(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return false;
  return bytes_of(tensor, extent_of(tensor)).sum().item<int64_t>() < static_cast<int64_t>(tensor.nbytes());
}

std::vector<at::Tensor> tensors_of(const StepTensor& argument) {
  return argument.pieces.empty() ? std::vector<at::Tensor>{argument.tensor} : argument.pieces;
}

bool share_memory(const StepTensor& a, const StepTensor& b) {
  for (const at::Tensor& one : tensors_of(a)) {
    for (const at::Tensor& other : tensors_of(b)) {
      if (share_memory(one, other)) return true;
    }
  }
  return false;
}

constexpr const char* kCopies =
    " A microbatch writes to a copy of its part, which the other would not show: pass a clone() of one.";

void check_written(const std::vector<StepTensor>& arguments, size_t written, const std::vector<at::Tensor>& constants) {
  const StepTensor& argument = arguments[written];
  for (const at::Tensor& tensor : tensors_of(argument)) {
    TORCH_CHECK_VALUE(!shares_with_itself(tensor), "step argument ", argument.position,
                      ": expected elements that have memory of their own, since the body writes to them, got sizes ",
                      tensor.sizes(), " with strides ", tensor.strides(), " (expand, unfold). Pass a clone() of it.");
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const StepTensor& other = arguments[i];
    TORCH_CHECK_VALUE(i == written || !share_memory(argument, other), "step argument ", argument.position,
                      ": expected memory of its own, since the body writes to it, got memory that it shares with ",
                      other.position == argument.position ? "another tensor of this argument"
                                                          : "argument " + std::to_string(other.position),
                      ".", kCopies);
  }
  for (const at::Tensor& constant : constants) {
    TORCH_CHECK_VALUE(
        !share_memory(argument, {.tensor = constant}), "step argument ", argument.position,
        ": expected memory of its own, since the body writes to it, got memory that it shares with a tensor of sizes ",
        constant.sizes(), " that the body uses, too, and that is no argument.", kCopies);
  }
}

bool is_used(const Graph& graph, const std::string& name) {
  return std::any_of(graph.values.begin(), graph.values.end(),
                     [&](const Value& value) { return is_named(value) && value.name == name; });
}

bool is_written(const Graph& graph, const std::string& name) {
  const auto named = std::find_if(graph.values.begin(), graph.values.end(),
                                  [&](const Value& value) { return is_named(value) && value.name == name; });
  return named != graph.values.end() && std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
           const auto& written = node.written_storages;
           return std::find(written.begin(), written.end(), named->storage) != written.end();
         });
}

// The name of a parameter or buffer on memory of the argument which is as asked; null: there is none.
const std::string* find_named_on(const StepTensor& argument, const runtime::Bindings& bindings,
                                 const std::function<bool(const std::string& name)>& is_wanted) {
  for (const at::Tensor& tensor : tensors_of(argument)) {
    const runtime::NamedTensor* first = bindings.find_storage(tensor);
    if (first == nullptr) continue;
    for (const runtime::NamedTensor& named : bindings.tensors()) {
      if (&bindings.first_on_storage(named) == first && is_wanted(named.name)) return &named.name;
    }
  }
  return nullptr;
}

void check_against_uses(const StepTensor& argument, const Graph& graph, const runtime::Bindings& bindings) {
  const auto* used = find_named_on(argument, bindings, [&](const std::string& name) { return is_used(graph, name); });
  TORCH_CHECK_VALUE(used == nullptr, "step argument ", argument.position,
                    ": expected memory of its own, since the body writes to it, got memory of '", *used,
                    "', which the body uses, too.", kCopies);
}

// The step has taken its arguments before the body writes to the model.
void check_against_writes(const StepTensor& argument, const Graph& graph, const runtime::Bindings& bindings) {
  const auto* written = find_named_on(argument, bindings, [&](const std::string& name) { return is_written(graph, name); });
  TORCH_CHECK_VALUE(written == nullptr, "step argument ", argument.position, ": expected memory of its own, got that of '",
                    *written, "', which the body writes to: the argument would not show it. Pass a clone() of it.");
}

}  // namespace

void check_argument_memory(const std::vector<StepTensor>& arguments, const Graph& graph, const std::vector<size_t>& written,
                           const std::vector<at::Tensor>& constants, const runtime::Bindings& bindings) {
  for (const StepTensor& argument : arguments) check_against_writes(argument, graph, bindings);
  for (size_t input : written) {
    check_written(arguments, input, constants);
    check_against_uses(arguments[input], graph, bindings);
  }
}

}  // namespace smp::engine
