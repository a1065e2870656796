// Boost parses; a second pass looks for keys that occur twice.
#include "smp/engine/files/json_object.h"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <boost/json/stream_parser.hpp>
#include <set>

namespace smp::engine {
namespace {

constexpr size_t kMaxDepth = 4;  // configurations are flat

// Boost's object keeps the last of equal keys and forgets the others, so they are looked for here.
struct RepeatedKeys {
  static constexpr size_t max_object_size = static_cast<size_t>(-1);
  static constexpr size_t max_array_size = static_cast<size_t>(-1);
  static constexpr size_t max_key_size = static_cast<size_t>(-1);
  static constexpr size_t max_string_size = static_cast<size_t>(-1);
  using Error = boost::json::error_code;
  using View = boost::json::string_view;

  bool on_document_begin(Error&) { return true; }
  bool on_document_end(Error&) { return true; }
  bool on_object_begin(Error&) {
    seen.emplace_back();
    return true;
  }
  bool on_object_end(size_t, Error&) {
    seen.pop_back();
    return true;
  }
  bool on_array_begin(Error&) { return true; }
  bool on_array_end(size_t, Error&) { return true; }
  bool on_key_part(View part, size_t, Error&) {
    key.append(part.data(), part.size());
    return true;
  }
  bool on_key(View part, size_t, Error&) {
    key.append(part.data(), part.size());
    if (!seen.back().insert(key).second && std::ranges::find(found, key) == found.end()) {
      found.push_back(key);
    }
    key.clear();
    return true;
  }
  bool on_string_part(View, size_t, Error&) { return true; }
  bool on_string(View, size_t, Error&) { return true; }
  bool on_number_part(View, Error&) { return true; }
  bool on_int64(int64_t, View, Error&) { return true; }
  bool on_uint64(uint64_t, View, Error&) { return true; }
  bool on_double(double, View, Error&) { return true; }
  bool on_bool(bool, Error&) { return true; }
  bool on_null(Error&) { return true; }
  bool on_comment_part(View, Error&) { return true; }
  bool on_comment(View, Error&) { return true; }

  std::string key;
  std::vector<std::set<std::string>> seen;  // in the objects that are open
  std::vector<std::string> found;
};

std::string excerpt(std::string_view text, size_t position) {
  constexpr size_t kBefore = 20, kAfter = 10;
  const size_t begin = position > kBefore ? position - kBefore : 0;
  std::string part(text.substr(begin, kBefore + kAfter));
  std::ranges::replace_if(part, [](unsigned char c) { return c < ' ' || c > '~'; }, ' ');
  return part;
}

std::string syntax_problem(std::string_view text, size_t position, std::string_view reason) {
  return "expected a JSON object, got a fault at byte " + std::to_string(position) + ", near '" + excerpt(text, position) +
         "' (" + std::string(reason) + "). Quote keys and words with \"; JSON's own words are true, false and null";
}

}  // namespace

JsonObject parse_json_object(std::string_view text) {
  JsonObject result;
  boost::json::parse_options options;
  options.max_depth = kMaxDepth;
  boost::json::stream_parser parser({}, options);
  boost::json::error_code error;
  const size_t parsed = parser.write(text.data(), text.size(), error);
  if (!error) parser.finish(error);
  if (error) {
    result.problem = syntax_problem(text, parsed, error.message());
    return result;
  }
  const boost::json::value value = parser.release();
  if (!value.is_object()) {
    result.problem = "expected a JSON object like {\"microbatches\": 4}, got another JSON value";
    return result;
  }
  result.members = value.get_object();
  boost::json::basic_parser<RepeatedKeys> scan(options);
  scan.write_some(false, text.data(), text.size(), error);
  result.repeated_keys = scan.handler().found;
  return result;
}

}  // namespace smp::engine
