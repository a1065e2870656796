// The reasons why an operator is in no tape.
#include "partitioner/graph/untaped.h"

#include <algorithm>

#include "partitioner/graph/operator_traits.h"

namespace smp::partitioner {
namespace {

// LibTorch makes gradients of rows only where this argument says so.
struct SparseRow {
  std::string_view op;
  size_t flag;
};
constexpr SparseRow kSparse[] = {{"aten::embedding", 4}, {"aten::embedding_bag", 5}};

bool makes_sparse_gradient(const Node& node) {
  const auto row =
      std::find_if(std::begin(kSparse), std::end(kSparse), [&](const SparseRow& one) { return one.op == node.op; });
  if (row == std::end(kSparse) || row->flag >= node.arguments.size()) return false;
  const bool* flag = std::get_if<bool>(&node.arguments[row->flag]);
  return flag != nullptr && *flag;
}

bool trains_complex_numbers(const Graph& graph, const Node& node) {
  const std::vector<ValueId> read = node_inputs(node);
  return std::any_of(read.begin(), read.end(), [&](ValueId id) {
    const TensorSpec& spec = graph.values[static_cast<size_t>(id)].spec;
    return c10::isComplexType(spec.dtype) && spec.requires_grad;
  });
}

}  // namespace

bool is_foreign(std::string_view op) {
  return !op.starts_with("aten::") && op != "smp::set_data";  // of which a tape holds aten::copy_
}

std::string why_untaped(std::string_view op, std::string_view overload) {
  if (is_foreign(op)) return std::string(op) + " is none of LibTorch's own operators";
  return has(Trait::kLooksAtNumbers, op, overload) ? std::string(op) + " reads values" : "";
}

std::string why_untaped(const Graph& graph, const Node& node) {
  std::string by_name = why_untaped(node.op, node.overload);
  if (!by_name.empty() || !graph.has_backward() || !node.grad_enabled) return by_name;
  if (makes_sparse_gradient(node)) return node.op + " makes sparse gradients";
  const bool is_complex = trains_complex_numbers(graph, node);
  return is_complex ? node.op + " trains complex numbers, whose gradients are lazily conjugated" : "";
}

}  // namespace smp::partitioner
