// The captured step as data: operators by schema name, arguments as values, parameters by qualified
// name. Owns no tensors, knows no ranks and no dispatcher.
#pragma once

#include <c10/core/ScalarType.h>

#include <complex>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace smp::partitioner {

using ValueId = int32_t;
using NodeId = int32_t;
inline constexpr ValueId kNoValue = -1;
inline constexpr NodeId kNoNode = -1;

/// Geometry of one tensor, strides included: a cut keeps them, since a contiguous copy would change the bits of what
/// follows.
struct TensorSpec {
  std::vector<int64_t> sizes{};
  std::vector<int64_t> strides{};  // in elements
  int64_t storage_offset = 0;      // in elements
  c10::ScalarType dtype = c10::ScalarType::Float;
  bool requires_grad = false;

  int64_t num_elements() const;
  /// Elements times element size; an expanded tensor counts every repetition.
  int64_t num_bytes() const;
  bool operator==(const TensorSpec&) const = default;
};

enum class ValueKind : uint8_t {
  kParameter,  // named as in module.named_parameters()
  kBuffer,     // named as in module.named_buffers()
  kInput,      // the step's i-th tensor argument, one microbatch of it
  kConstant,   // a tensor that is none of these and does not change: content travels with the
               // program
  kResult,     // made by an operator
};

/// One tensor of the recorded step. An in-place operator makes a new Value on the same storage.
struct Value {
  ValueKind kind = ValueKind::kResult;
  std::string name{};  // parameters and buffers: qualified name; inputs, constants: "input.0", "constant.0"
  TensorSpec spec{};
  NodeId producer = kNoNode;       // kResult only
  int32_t output_index = 0;        // position among the producer's flattened outputs
  int32_t storage = -1;            // values with the same number share memory: the alias set
  bool is_wrapped_number = false;  // constants: a C++/Python scalar in tensor form, which promotes differently

  bool operator==(const Value&) const = default;
};

/// "The device this rank computes on." No device index is ever baked into a graph.
struct StageDevice {
  bool operator==(const StageDevice&) const = default;
};
/// An explicit device type the user wrote, e.g. torch::kCPU ("cpu").
struct NamedDevice {
  std::string type;
  bool operator==(const NamedDevice&) const = default;
};
/// An undefined tensor, which is not the same argument as None.
struct UndefinedTensor {
  bool operator==(const UndefinedTensor&) const = default;
};
struct ValueRef {
  ValueId id = kNoValue;
  bool operator==(const ValueRef&) const = default;
};
/// Tensor[] or Tensor?[] (`optional_elements`); kNoValue stands for a missing element.
struct ValueRefList {
  std::vector<ValueId> ids;
  bool optional_elements = false;
  bool operator==(const ValueRefList&) const = default;
};
/// Scalar[]: elements keep their own type.
struct ScalarList {
  std::vector<std::variant<bool, int64_t, double>> elements;
  bool operator==(const ScalarList&) const = default;
};

/// One operator argument; std::monostate is None. Doubles compare bit by bit through
/// `same_argument`.
using Argument = std::variant<std::monostate, UndefinedTensor, ValueRef, ValueRefList, bool, int64_t, double,
                              std::complex<double>, std::string, std::vector<int64_t>, std::vector<double>,
                              std::vector<bool>, ScalarList, StageDevice, NamedDevice>;

/// An argument that is another number in one run of the graph than it was recorded with.
struct ScalarOverride {
  NodeId node = kNoNode;
  int32_t argument = 0;
  Argument value;  // bool, int64, double or complex
};

struct Autocast {
  bool enabled = false;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;
  bool operator==(const Autocast&) const = default;
};

/// One recorded operator call, in program order.
struct Node {
  std::string op;                           // "aten::addmm"
  std::string overload;                     // "" or "out", "Scalar", …
  std::vector<Argument> arguments{};        // one per schema argument
  std::vector<ValueId> outputs{};           // returned tensors, lists flattened; kNoValue: undefined
  std::vector<int32_t> written_storages{};  // alias sets this call writes to (schema and table of hidden mutation)
  bool grad_enabled = true;
  Autocast autocast{};
  int32_t random_ordinal = -1;    // >= 0: this is the k-th random operator of the step body; fixes its seed
  int32_t recompute_region = -1;  // >= 0: runs again in the backward, with all operators of this region
  std::string module{};           // qualified path of the module, as far as known: "encoder.layers.3"

  bool operator==(const Node&) const = default;
};

/// One microbatch of a step body: model calls, losses, returned values, the roots of its backwards.
struct Graph {
  std::vector<Value> values;
  std::vector<Node> nodes;              // program order = execution order
  std::vector<ValueId> inputs;          // step arguments in order
  std::vector<ValueId> returned;        // what the body returns, flattened
  std::vector<ValueId> read;            // whose content the body looks at, on the leader, while it runs
  std::vector<ValueId> backward_roots;  // losses given to backward(), in order; none: evaluation
  std::string key;                      // signature: training flags, dtypes, shapes, grad mode in raw bytes

  bool has_backward() const { return !backward_roots.empty(); }
  bool is_backward_root(ValueId value) const;
  size_t num_storages() const;  // alias sets, of values and of what is written
  bool operator==(const Graph&) const = default;
};

/// The tensors a node reads, in argument order, without duplicates.
std::vector<ValueId> node_inputs(const Node& node);

/// Whether the model knows `value` by a name: a parameter or a buffer.
inline bool is_named(const Value& value) { return value.kind == ValueKind::kParameter || value.kind == ValueKind::kBuffer; }

}  // namespace smp::partitioner
