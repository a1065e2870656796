// Checked access to JSON of unknown origin.
#include "partitioner/graph/graph_json_io.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <bit>

namespace smp::partitioner::json_io {
namespace {

std::string path(const Where& where) {
  if (where.parent == nullptr) return {};
  std::string text = path(*where.parent);
  if (where.index >= 0) return text.append("[").append(std::to_string(where.index)).append("]");
  if (!text.empty()) text += '.';
  return text.append(where.field);
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

void refuse(const Where& where, const std::string& expected, const std::string& got) {
  const std::string place = path(where);
  const Where* root = &where;
  while (root->parent != nullptr) root = root->parent;
  TORCH_CHECK_VALUE(false, root->field, " data: ", place.empty() ? "the text" : place, ": expected ", expected, ", got ",
                    got, ". Pass what serialise() of the same smp version wrote, unchanged.");
}

json::value parse(std::string_view text, const Where& root, size_t max_depth, const json::storage_ptr& storage) {
  json::parse_options options;
  options.max_depth = max_depth;
  options.allow_invalid_utf8 = true;
  boost::system::error_code error;
  json::value document = json::parse(json::string_view(text.data(), text.size()), error, storage, options);
  if (error) refuse(root, "JSON at most " + std::to_string(max_depth) + " deep", error.message());
  return document;
}

std::string quoted(std::string_view text) { return std::string("\"").append(text).append("\""); }

std::string describe(const json::value& value) {
  constexpr size_t kLongest = 60;
  std::string text = json::serialize(value);
  if (text.size() > kLongest) text = text.substr(0, kLongest).append("...");
  return text;
}

const json::array& read_array(const json::value& value, const Where& where) {
  if (!value.is_array()) refuse(where, "an array", describe(value));
  return value.get_array();
}

std::string read_string(const json::value& value, const Where& where) {
  if (!value.is_string()) refuse(where, "a string", describe(value));
  return {value.get_string().data(), value.get_string().size()};
}

bool read_bool(const json::value& value, const Where& where) {
  if (!value.is_bool()) refuse(where, "true or false", describe(value));
  return value.get_bool();
}

int64_t read_integer(const json::value& value, const Where& where, int64_t low, int64_t high) {
  if (!value.is_int64() || value.get_int64() < low || value.get_int64() > high) {
    refuse(where, "an integer from " + std::to_string(low) + " to " + std::to_string(high), describe(value));
  }
  return value.get_int64();
}

std::vector<int64_t> read_integers(const json::value& value, const Where& where, int64_t low) {
  std::vector<int64_t> result;
  const json::array& array = read_array(value, where);
  result.reserve(array.size());
  for (const json::value& element : array) {
    result.push_back(read_integer(element, where.at(result.size()), low));
  }
  return result;
}

std::vector<int32_t> read_ids(const json::value& value, const Where& where, int32_t low, int32_t high) {
  std::vector<int32_t> result;
  const json::array& array = read_array(value, where);
  result.reserve(array.size());
  for (const json::value& element : array) {
    const Where here = where.at(result.size());
    result.push_back(static_cast<int32_t>(read_integer(element, here, low, high)));
  }
  return result;
}

std::string bits_of(double value) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  std::string text;
  for (int shift = 60; shift >= 0; shift -= 4) text += kDigits[bits >> shift & 0xF];
  return text;
}

double read_bits(const json::value& value, const Where& where) {
  uint64_t bits = 0;
  const bool is_bits =
      value.is_string() && value.get_string().size() == 16 &&
      std::all_of(value.get_string().begin(), value.get_string().end(), [](char c) { return hex_digit(c) >= 0; });
  if (!is_bits) refuse(where, "the bits of a double as 16 hex digits", describe(value));
  for (char c : value.get_string()) bits = bits << 4 | static_cast<uint64_t>(hex_digit(c));
  return std::bit_cast<double>(bits);
}

Fields::Fields(const json::value& value, const Where& where)
    : object_(value.is_object() ? value.get_object() : (refuse(where, "an object", describe(value)), value.get_object())),
      where_(where) {}

const json::value& Fields::operator[](std::string_view name) {
  const json::value* field = object_.if_contains(name);
  if (field == nullptr) refuse(where_, std::string("a field ").append(quoted(name)), "none");
  taken_.push_back(name);
  return *field;
}

void Fields::expect_no_more() const {
  if (object_.size() == taken_.size()) return;
  for (const auto& field : object_) {
    if (std::find(taken_.begin(), taken_.end(), std::string_view(field.key())) == taken_.end()) {
      refuse(where_, "no other fields", quoted(field.key()));
    }
  }
}

}  // namespace smp::partitioner::json_io
