// Builds small captured graphs by hand.
#pragma once

#include <string>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::testing {

/// Every method returns the id of the value that it made. Tensors are float32 and contiguous unless said otherwise.
///
///   GraphBuilder g;
///   auto x = g.input({8, 16});
///   auto y = g.linear(x, "fc", 32);
///   auto loss = g.sum(y);
///   Graph graph = g.build(loss);
class GraphBuilder {
 public:
  using ValueId = partitioner::ValueId;
  using Sizes = std::vector<int64_t>;

  ValueId input(const Sizes& sizes, c10::ScalarType dtype = c10::ScalarType::Float);
  ValueId parameter(const std::string& name, const Sizes& sizes);
  ValueId buffer(const std::string& name, const Sizes& sizes);
  ValueId constant(const Sizes& sizes, bool is_wrapped_number = false);

  /// A new tensor made by `op`. It requires a gradient when one of `arguments` does.
  ValueId op(const std::string& op, const std::vector<ValueId>& arguments, const Sizes& sizes);
  /// A tensor on the storage of `base`.
  ValueId view(const std::string& op, ValueId base, const partitioner::TensorSpec& spec);
  /// "relu_": writes to the storage of `target` and returns a new value on it.
  ValueId in_place(const std::string& op, ValueId target, const std::vector<ValueId>& others = {});

  /// aten::linear with new parameters `name`.weight and `name`.bias.
  ValueId linear(ValueId input, const std::string& name, int64_t features);
  /// aten::linear with an existing weight.
  ValueId linear_with(ValueId input, ValueId weight);
  ValueId relu(ValueId input);
  /// aten::batch_norm, which writes `name`.running_mean without saying so in its schema.
  ValueId batch_norm(ValueId input, const std::string& name);
  ValueId sum(ValueId input);

  partitioner::TensorSpec& spec(ValueId value) { return graph_.values[value].spec; }
  partitioner::Node& last_node() { return graph_.nodes.back(); }
  int num_nodes() const { return static_cast<int>(graph_.nodes.size()); }

  /// The graph; `backward_root` kNoValue means evaluation.
  partitioner::Graph build(ValueId backward_root = partitioner::kNoValue) const;

 private:
  ValueId add_value(partitioner::Value value);
  ValueId add_node(const std::string& op, const std::vector<ValueId>& arguments, partitioner::Value output);

  partitioner::Graph graph_;
  int32_t num_storages_ = 0;
};

partitioner::TensorSpec contiguous_spec(const std::vector<int64_t>& sizes, c10::ScalarType dtype = c10::ScalarType::Float);

}  // namespace smp::testing
