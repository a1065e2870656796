// Owns the strict reading of one JSON object from text that a user typed: shallow, no key twice,
// and a complaint that says where.  It knows nothing about what the keys mean.
#pragma once

#include <boost/json/object.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace smp::engine {

struct JsonObject {
  /// Empty when the text is not a JSON object.
  boost::json::object members;
  /// What is wrong with the text as a whole: "expected ..., got ...".
  std::optional<std::string> problem;
  /// Keys that occur more than once in one object, each once, in order of their second occurrence.
  std::vector<std::string> repeated_keys;
};

/// Never throws for what the text holds.
JsonObject parse_json_object(std::string_view text);

}  // namespace smp::engine
