// What all JSON forms of the partitioner share: names, readers, writers and refusals.
#pragma once

#include <array>
#include <boost/json.hpp>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "partitioner/graph/graph.h"

namespace smp::partitioner::json_io {

namespace json = boost::json;

inline constexpr int kFormatVersion = 1;
inline constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

/// Names of ValueKind, in its order.
inline constexpr std::array<std::string_view, 5> kValueKinds = {"parameter", "buffer", "input", "constant", "result"};

/// Where in the text we are; the root says what the text is. A list on the stack, so that nothing is spent on paths without
/// errors.
struct Where {
  const Where* parent = nullptr;
  std::string_view field;
  int64_t index = -1;  // >= 0: element of an array

  Where at(std::string_view name) const { return {this, name, -1}; }
  Where at(size_t element) const { return {this, {}, static_cast<int64_t>(element)}; }
};

/// Throws c10::ValueError: "graph data: nodes[3].outputs: expected <expected>, got <got>". The first word is the root's
/// field.
[[noreturn]] void refuse(const Where& where, const std::string& expected, const std::string& got);

/// `text` as JSON of at most `max_depth` levels; names in it may be any bytes.
json::value parse(std::string_view text, const Where& root, size_t max_depth, const json::storage_ptr& storage = {});

template <typename Elements>
json::array array_of(const Elements& elements, const json::storage_ptr& storage = {}) {
  json::array array(storage);
  array.reserve(elements.size());
  for (const auto& element : elements) array.emplace_back(element);
  return array;
}

/// The text in double quotes.
std::string quoted(std::string_view text);

/// A short description of any JSON value for an error text.
std::string describe(const json::value& value);

const json::array& read_array(const json::value& value, const Where& where);
std::string read_string(const json::value& value, const Where& where);
bool read_bool(const json::value& value, const Where& where);
/// Low and high are both allowed.
int64_t read_integer(const json::value& value, const Where& where, int64_t low = std::numeric_limits<int64_t>::min(),
                     int64_t high = std::numeric_limits<int64_t>::max());
std::vector<int64_t> read_integers(const json::value& value, const Where& where,
                                   int64_t low = std::numeric_limits<int64_t>::min());
std::vector<int32_t> read_ids(const json::value& value, const Where& where, int32_t low, int32_t high);

/// 16 lower-case hex digits of the bits.
std::string bits_of(double value);
double read_bits(const json::value& value, const Where& where);

/// The fields of one object, all demanded and no others allowed.
class Fields {
 public:
  Fields(const json::value& value, const Where& where);
  const json::value& operator[](std::string_view name);
  /// Call after the last field: refuses what was not asked for.
  void expect_no_more() const;

 private:
  const json::object& object_;
  const Where& where_;
  std::vector<std::string_view> taken_;
};

json::value write_argument(const Argument& argument, const json::storage_ptr& storage);
/// References must lie in [0, num_values).
Argument read_argument(const json::value& value, const Where& where, int32_t num_values);

}  // namespace smp::partitioner::json_io
