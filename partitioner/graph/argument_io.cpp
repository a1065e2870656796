// Arguments as JSON. Plain JSON where its type says all: null, bool, integer, string; otherwise an
// object with one field, whose name is the type.
#include "partitioner/graph/graph_json_io.h"

namespace smp::partitioner::json_io {
namespace {

json::value tagged(std::string_view tag, json::value content, const json::storage_ptr& storage) {
  json::object object(storage);
  object.reserve(1);
  object.emplace(tag, std::move(content));
  return object;
}

json::value write_double(double value, const json::storage_ptr& storage) {
  return tagged("double", json::value(bits_of(value), storage), storage);
}

struct Writer {
  const json::storage_ptr& storage;

  json::value operator()(std::monostate) const { return nullptr; }
  json::value operator()(UndefinedTensor) const { return tagged("undefined", nullptr, storage); }
  json::value operator()(const ValueRef& ref) const { return tagged("value", ref.id, storage); }
  json::value operator()(const ValueRefList& list) const {
    return tagged(list.optional_elements ? "optional_values" : "values", array_of(list.ids, storage), storage);
  }
  json::value operator()(bool flag) const { return flag; }
  json::value operator()(int64_t number) const { return number; }
  json::value operator()(double number) const { return write_double(number, storage); }
  json::value operator()(const std::complex<double>& number) const {
    const std::vector<std::string> parts{bits_of(number.real()), bits_of(number.imag())};
    return tagged("complex", array_of(parts, storage), storage);
  }
  json::value operator()(const std::string& text) const { return json::value(text, storage); }
  json::value operator()(const std::vector<int64_t>& numbers) const {
    return tagged("ints", array_of(numbers, storage), storage);
  }
  json::value operator()(const std::vector<double>& numbers) const {
    std::vector<std::string> bits;
    for (double number : numbers) bits.push_back(bits_of(number));
    return tagged("doubles", array_of(bits, storage), storage);
  }
  json::value operator()(const std::vector<bool>& flags) const {
    json::array array(storage);
    for (const bool flag : flags) array.emplace_back(flag);
    return tagged("bools", std::move(array), storage);
  }
  json::value operator()(const ScalarList& list) const {
    json::array array(storage);
    for (const auto& element : list.elements) array.push_back(std::visit(*this, element));
    return tagged("scalars", std::move(array), storage);
  }
  json::value operator()(StageDevice) const { return tagged("stage_device", nullptr, storage); }
  json::value operator()(const NamedDevice& device) const {
    return tagged("device", json::value(device.type, storage), storage);
  }
};

/// The only field of an object.
const json::key_value_pair& only_field(const json::value& value, const Where& where) {
  if (!value.is_object() || value.get_object().size() != 1) {
    refuse(where, "null, bool, integer, string or an object with one field", describe(value));
  }
  return *value.get_object().begin();
}

std::complex<double> read_complex(const json::value& value, const Where& where) {
  const json::array& parts = read_array(value, where);
  if (parts.size() != 2) refuse(where, "real and imaginary part", describe(value));
  return {read_bits(parts[0], where.at(0)), read_bits(parts[1], where.at(1))};
}

ScalarList read_scalars(const json::value& value, const Where& where) {
  ScalarList list;
  for (const json::value& element : read_array(value, where)) {
    const Where here = where.at(list.elements.size());
    if (element.is_bool()) {
      list.elements.emplace_back(element.get_bool());
    } else if (element.is_int64()) {
      list.elements.emplace_back(element.get_int64());
    } else {
      const auto& field = only_field(element, here);
      if (field.key() != "double") refuse(here, "a bool, an integer or a double", describe(element));
      list.elements.emplace_back(read_bits(field.value(), here.at("double")));
    }
  }
  return list;
}

template <typename Element, typename Read>
std::vector<Element> read_list(const json::value& value, const Where& where, const Read& read) {
  std::vector<Element> result;
  for (const json::value& element : read_array(value, where)) {
    result.push_back(read(element, where.at(result.size())));
  }
  return result;
}

Argument read_tagged(const json::value& value, const Where& where, int32_t num_values) {
  const auto& field = only_field(value, where);
  const std::string_view tag = field.key();
  const json::value& content = field.value();
  const Where here = where.at(tag);
  if (tag == "value") {
    return ValueRef{static_cast<ValueId>(read_integer(content, here, 0, num_values - 1))};
  }
  if (tag == "values") return ValueRefList{read_ids(content, here, 0, num_values - 1), false};
  if (tag == "optional_values") {
    return ValueRefList{read_ids(content, here, kNoValue, num_values - 1), true};
  }
  if (tag == "double") return read_bits(content, here);
  if (tag == "ints") return read_integers(content, here);
  if (tag == "doubles") return read_list<double>(content, here, read_bits);
  if (tag == "bools") return read_list<bool>(content, here, read_bool);
  if (tag == "scalars") return read_scalars(content, here);
  if (tag == "complex") return read_complex(content, here);
  if (tag == "device") return NamedDevice{read_string(content, here)};
  if (tag != "stage_device" && tag != "undefined") {
    refuse(where, "a known type of argument", quoted(tag));
  }
  if (!content.is_null()) refuse(here, "null", describe(content));
  if (tag == "undefined") return UndefinedTensor{};
  return StageDevice{};
}

}  // namespace

json::value write_argument(const Argument& argument, const json::storage_ptr& storage) {
  return std::visit(Writer{storage}, argument);
}

Argument read_argument(const json::value& value, const Where& where, int32_t num_values) {
  if (value.is_null()) return std::monostate{};
  if (value.is_bool()) return value.get_bool();
  if (value.is_int64()) return value.get_int64();
  if (value.is_string()) return read_string(value, where);
  return read_tagged(value, where, num_values);
}

}  // namespace smp::partitioner::json_io
