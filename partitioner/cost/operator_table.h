// One row per operator: what it computes and what autograd keeps of it. Adding an operator is one line.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "partitioner/graph/graph.h"

namespace smp::partitioner {

/// Which tensors of a forward call autograd keeps until its backward. Flags may be combined.
enum SavedFlag : uint8_t {
  kSavesNothing = 0,
  kSavesInputs = 1,    // every tensor argument
  kSavesOperands = 2,  // a tensor argument if some other one requires a gradient, as products do
  kSavesOutputs = 4,
  kSavesIndices = 8,  // tensor arguments of an integral type
};

/// The gradient of an input, in memory.
enum class GradientForm : uint8_t {
  kOwn,       // a new tensor
  kSame,      // the output's gradient itself, where their sizes agree: additions and copies
  kExpanded,  // the output's gradient repeated by strides: sums
};

struct OperatorRow {
  std::string_view op;  // schema name without overload; "name_" (in place) uses the row of "name"
  /// Floating-point operations of one forward call, a multiply-add counted as two. Null: bytes decide.
  double (*flops)(const Graph&, const Node&) = nullptr;
  /// Backward work in units of forward work; matrix products count per argument that needs a gradient.
  double backward_factor = 1;
  double transcendentals_per_element = 0;  // exp, log, tanh, division: per output element
  double randoms_per_element = 0;          // drawn numbers, per output element
  uint8_t saves = kSavesNothing;
  /// Bytes that autograd keeps beside recorded tensors: masks, indices, workspaces of composites. May be null.
  int64_t (*extra_saved_bytes)(const Graph&, const Node&) = nullptr;
  /// How many of the first tensor arguments are kept as copies, which extra_saved_bytes counts; a
  /// call that makes such copies keeps no outputs. May be null.
  int (*num_copies)(const Graph&, const Node&) = nullptr;
  /// Bytes of the memory that the first output lies on, where it is larger than the tensor. May be null.
  int64_t (*output_storage_bytes)(const Graph&, const Node&) = nullptr;
  /// Bytes that the forward holds for its own use, beyond its outputs. May be null.
  int64_t (*workspace_bytes)(const Graph&, const Node&) = nullptr;
  /// Bytes that the backward holds for its own use, beyond gradients of inputs. May be null.
  int64_t (*backward_workspace_bytes)(const Graph&, const Node&) = nullptr;
  GradientForm gradient = GradientForm::kOwn;
  bool is_product = false;  // matrix product or convolution
  /// Products: where their factors stand; tensors elsewhere (a bias) are added. A list of tensors counts whole.
  uint8_t first_factor = 0;
  uint8_t num_factors = 2;
  bool is_view = false;                                    // moves no bytes
  bool may_be_view = false;                                // moves none if its output lies on the memory of argument 0
  bool is_lookup = false;                                  // forward touches as much of argument 0 as it returns
  double (*kernels)(const Graph&, const Node&) = nullptr;  // leaf kernels of a composite; null: one
};

/// The row of a node's operator; for operators without one a row that moves its bytes once and saves its inputs.
const OperatorRow& operator_row(const Node& node);

/// Whether `node` only looks at memory that exists: then it moves no bytes.
bool moves_nothing(const Graph& graph, const Node& node);

}  // namespace smp::partitioner
