// Graphs for people.
#include "tests/support/graph_text.h"

#include <array>
#include <charconv>

namespace smp::support {
namespace {

using namespace partitioner;

template <typename Elements, typename Print>
std::string join(const Elements& elements, std::string_view separator, const Print& print) {
  std::string text;
  bool is_first = true;
  for (const auto& element : elements) {
    if (!is_first) text += separator;
    is_first = false;
    text += print(element);
  }
  return text;
}

/// Names as torch prints them; the rest as c10 does.
std::string dtype_name(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::ScalarType::Float:
      return "float32";
    case c10::ScalarType::Double:
      return "float64";
    case c10::ScalarType::Half:
      return "float16";
    case c10::ScalarType::BFloat16:
      return "bfloat16";
    case c10::ScalarType::Long:
      return "int64";
    case c10::ScalarType::Int:
      return "int32";
    case c10::ScalarType::Short:
      return "int16";
    case c10::ScalarType::Char:
      return "int8";
    case c10::ScalarType::Byte:
      return "uint8";
    case c10::ScalarType::Bool:
      return "bool";
    default:
      return c10::toString(dtype);
  }
}

bool is_contiguous(const TensorSpec& spec) {
  int64_t expected = 1;
  for (size_t i = spec.sizes.size(); i-- > 0;) {
    if (spec.sizes[i] != 1 && spec.strides[i] != expected) return false;
    expected *= spec.sizes[i];
  }
  return true;
}

std::string type_text(const TensorSpec& spec) {
  const auto number = [](int64_t n) { return std::to_string(n); };
  std::string text = dtype_name(spec.dtype);
  text.append("[").append(join(spec.sizes, ",", number)).append("]");
  if (!is_contiguous(spec)) text.append("{").append(join(spec.strides, ",", number)).append("}");
  return text;
}

/// Shortest digits that give the same double; always tells itself from an integer.
std::string double_text(double number) {
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), number).ptr;
  std::string text(buffer.data(), end);
  if (text.find_first_of(".en") == std::string::npos) text += ".0";
  return text;
}

class Printer {
 public:
  explicit Printer(const Graph& graph) : graph_(graph) {}

  std::string print() {
    text_.append("# ").append(graph_.key).append("\n");
    for (size_t id = 0; id < graph_.values.size(); ++id) print_leaf(static_cast<ValueId>(id));
    for (const Node& node : graph_.nodes) print_node(node);
    text_.append("return ").append(join(graph_.returned, ", ", id_text)).append("\n");
    if (!graph_.read.empty()) {
      text_.append("read ").append(join(graph_.read, ", ", id_text)).append("\n");
    }
    for (ValueId root : graph_.backward_roots) {
      text_.append("backward ").append(id_text(root)).append("\n");
    }
    return std::move(text_);
  }

  // One per alternative of Argument.
  std::string operator()(std::monostate) const { return "None"; }
  std::string operator()(UndefinedTensor) const { return "undefined"; }
  std::string operator()(const ValueRef& ref) const { return named(ref.id); }
  std::string operator()(const ValueRefList& list) const {
    return bracketed(join(list.ids, ", ", [this](ValueId id) { return named(id); }));
  }
  std::string operator()(bool flag) const { return flag ? "true" : "false"; }
  std::string operator()(int64_t number) const { return std::to_string(number); }
  std::string operator()(double number) const { return double_text(number); }
  std::string operator()(const std::complex<double>& number) const {
    return std::string("(").append(double_text(number.real())).append(", ").append(double_text(number.imag())).append("j)");
  }
  std::string operator()(const std::string& text) const { return std::string("\"").append(text).append("\""); }
  template <typename Element>
  std::string operator()(const std::vector<Element>& elements) const {
    return bracketed(join(elements, ", ", [this](Element element) { return (*this)(element); }));
  }
  std::string operator()(const ScalarList& list) const {
    return bracketed(join(list.elements, ", ", [this](const auto& element) { return std::visit(*this, element); }));
  }
  std::string operator()(StageDevice) const { return "device"; }
  std::string operator()(const NamedDevice& device) const { return std::string("device(").append(device.type).append(")"); }

 private:
  static std::string bracketed(const std::string& text) { return std::string("[").append(text).append("]"); }
  static std::string id_text(ValueId id) {
    return id == kNoValue ? "undefined" : std::string("%").append(std::to_string(id));
  }
  std::string named(ValueId id) const {
    if (id == kNoValue) return "None";
    const std::string& name = graph_.values[id].name;
    return name.empty() ? id_text(id) : id_text(id).append(" ").append(name);
  }

  void print_leaf(ValueId id) {
    static constexpr std::array<const char*, 4> kKinds = {"parameter", "buffer", "input", "constant"};
    const Value& value = graph_.values[id];
    if (value.kind == ValueKind::kResult) return;
    text_.append(kKinds[static_cast<size_t>(value.kind)]).append(" ").append(named(id));
    text_.append(": ").append(type_text(value.spec));
    text_.append(value.spec.requires_grad ? " requires_grad\n" : "\n");
  }

  void print_node(const Node& node) {
    text_ += join(node.outputs, ", ", [this](ValueId id) {
      if (id == kNoValue) return id_text(id);
      return id_text(id).append(": ").append(type_text(graph_.values[id].spec));
    });
    text_.append(node.outputs.empty() ? "" : " = ").append(node.op);
    if (!node.overload.empty()) text_.append(".").append(node.overload);
    text_.append("(").append(
        join(node.arguments, ", ", [this](const Argument& argument) { return std::visit(*this, argument); }));
    text_.append(")").append(remarks(node)).append("\n");
  }

  static std::string remarks(const Node& node) {
    std::vector<std::string> parts;
    if (!node.module.empty()) parts.push_back(node.module);
    if (!node.grad_enabled) parts.push_back("no_grad");
    if (node.autocast.enabled) parts.push_back("autocast " + dtype_name(node.autocast.dtype));
    if (node.random_ordinal >= 0) parts.push_back("random " + std::to_string(node.random_ordinal));
    for (int32_t storage : node.written_storages) {
      parts.push_back("writes storage " + std::to_string(storage));
    }
    if (parts.empty()) return {};
    return "   # " + join(parts, ", ", [](const std::string& part) { return part; });
  }

  const Graph& graph_;
  std::string text_;
};

}  // namespace

std::string to_text(const Graph& graph) { return Printer(graph).print(); }

}  // namespace smp::support
