// Composing and writing the lines.
#include "examples/common/step_log.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <charconv>
#include <cmath>

namespace examples {
namespace {

// "%.9g" in the C locale.
std::string number_text(double number) {
  if (!std::isfinite(number)) return "null";
  constexpr int kDigits = 9;
  char text[32];
  const auto end = std::to_chars(text, text + sizeof text, number, std::chars_format::general, kDigits).ptr;
  return {text, end};
}

// "a":1.5,"b":2
std::string fields_text(const std::vector<std::pair<std::string, double>>& figures) {
  std::string fields;
  for (const auto& [name, number] : figures) {
    fields.append(fields.empty() ? "" : ",");
    fields.append(boost::json::serialize(boost::json::string(name)));
    fields.append(":").append(number_text(number));
  }
  return fields;
}

// The text itself, on one line: to parse and print it again would change digits.
std::string one_line(const char* what, std::string_view json) {
  boost::json::error_code error;
  boost::json::parse(json, error);
  TORCH_CHECK_VALUE(!error, "step log: expected the ", what, " as JSON, got '", json, "' (", error.message(),
                    "). Give Config::to_json() and the plan's JSON text.");
  std::string line(json);
  std::ranges::replace_if(line, [](char c) { return c == '\n' || c == '\r'; }, ' ');
  return line;
}

}  // namespace

StepLog::StepLog(const std::string& path, bool is_writer) : path_(is_writer ? path : "") {
  if (path_.empty()) return;
  file_.open(path_, std::ios::trunc);
  TORCH_CHECK_VALUE(file_.good(), "step log: expected a file that can be written, got ", path_,
                    ". Create its folder or give another --log.");
}

void StepLog::start(std::string_view config_json, std::string_view plan_json) {
  std::string line = "{\"config\":";
  line.append(one_line("configuration", config_json));
  line.append(",\"plan\":").append(one_line("plan", plan_json)).append("}");
  write_line(line);
}

void StepLog::step(const StepRecord& record) {
  std::string line = "{\"step\":";
  line.append(std::to_string(record.step));
  line.append(",\"loss\":").append(number_text(record.loss));
  line.append(",\"step_s\":").append(number_text(record.step_s));
  if (!record.figures.empty()) line.append(",").append(fields_text(record.figures));
  write_line(line.append("}"));
}

void StepLog::finish(const std::vector<std::pair<std::string, double>>& summary) {
  write_line("{\"summary\":{" + fields_text(summary) + "}}");
}

void StepLog::write_line(const std::string& line) {
  if (path_.empty()) return;
  file_ << line << '\n' << std::flush;
  TORCH_CHECK(file_.good(), "step log: expected to write a line to ", path_,
              ", got an error of the file system. Check the space on its disk.");
}

}  // namespace examples
