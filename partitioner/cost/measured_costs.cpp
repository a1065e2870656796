// Keys of operators, and the table of their times.
#include "partitioner/cost/measured_costs.h"

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cmath>

#include "partitioner/graph/graph_json_io.h"

namespace smp::partitioner {

namespace json = json_io::json;

namespace {

void append_numbers(std::string& text, const std::vector<int64_t>& numbers) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(numbers[i]);
  }
}

void append_tensor(std::string& text, const Graph& graph, ValueId id) {
  if (id == kNoValue) {
    text += '-';
    return;
  }
  const Value& value = graph.values[static_cast<size_t>(id)];
  text.append(c10::toString(value.spec.dtype)).append("[");
  append_numbers(text, value.spec.sizes);
  text += '|';
  append_numbers(text, value.spec.strides);
  text += ']';
  if (value.spec.requires_grad) text += 'g';
  if (is_named(value)) text += 'w';  // its gradient is added to what is there
}

void append_argument(std::string& text, const Graph& graph, const Argument& argument) {
  if (const auto* value = std::get_if<ValueRef>(&argument)) {
    append_tensor(text, graph, value->id);
  } else if (const auto* list = std::get_if<ValueRefList>(&argument)) {
    text += '(';
    for (const ValueId id : list->ids) append_tensor(text, graph, id);
    text += ')';
  } else {
    text += json::serialize(json_io::write_argument(argument, {}));
  }
}

double read_number(std::string_view key, const json::value& value) {
  const double number = value.is_number() ? value.to_number<double>() : -1;
  TORCH_CHECK_VALUE(std::isfinite(number) && number >= 0, "measured costs: expected a number of at least 0 for '", key,
                    "', got ", json::serialize(value), ".");
  return number;
}

OperatorTime read_time(std::string_view key, const json::value& value) {
  const auto* numbers = value.if_array();
  TORCH_CHECK_VALUE(numbers != nullptr && numbers->size() == 2,
                    "measured costs: expected two times in microseconds for the operator '", key, "', got ",
                    json::serialize(value), ".");
  return {read_number(key, numbers->at(0)), read_number(key, numbers->at(1))};
}

constexpr std::string_view kAveraging = "averaging";  // no operator of any library: these have "::"

}  // namespace

std::string operator_key(const Graph& graph, const Node& node) {
  std::string key = node.op;
  if (!node.overload.empty()) key.append(".").append(node.overload);
  for (const Argument& argument : node.arguments) {
    key += ' ';
    append_argument(key, graph, argument);
  }
  if (!node.grad_enabled) key += " no_grad";
  if (node.autocast.enabled) key.append(" autocast ").append(c10::toString(node.autocast.dtype));
  if (graph.has_backward()) key += " trains";
  if (!node.module.empty()) key.append(" in ").append(node.module);
  return key;
}

void MeasuredCosts::add(const Graph& graph, const std::vector<std::optional<OperatorTime>>& times) {
  std::map<std::string, std::pair<OperatorTime, int>> sums;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (!times.at(n)) continue;
    auto& [sum, count] = sums[operator_key(graph, graph.nodes[n])];
    sum.forward_us += times[n]->forward_us;
    sum.backward_us += times[n]->backward_us;
    ++count;
  }
  for (const auto& [key, of_key] : sums) {
    const auto& [sum, count] = of_key;
    times_[key] = {sum.forward_us / count, sum.backward_us / count};
  }
}

const OperatorTime* MeasuredCosts::find(const Graph& graph, const Node& node) const {
  const auto known = times_.find(operator_key(graph, node));
  return known == times_.end() ? nullptr : &known->second;
}

bool MeasuredCosts::covers(const Graph& graph) const {
  for (const Node& node : graph.nodes) {
    if (find(graph, node) == nullptr) return false;
  }
  return true;
}

std::string MeasuredCosts::to_json() const {
  json::object operators;
  for (const auto& [key, time] : times_) {
    operators[key] = json::array{time.forward_us, time.backward_us};
  }
  if (averaging_us_per_mib_ > 0) operators[kAveraging] = averaging_us_per_mib_;
  return json::serialize(operators);
}

void MeasuredCosts::add_json(std::string_view text) {
  json::parse_options options;
  options.max_depth = 2;              // operators, numbers
  options.allow_invalid_utf8 = true;  // keys name modules, whose names may be any bytes
  json::error_code error;
  const json::value parsed = json::parse(text, error, {}, options);
  TORCH_CHECK_VALUE(!error && parsed.is_object(), "measured costs: expected a JSON object of operators, got ",
                    error ? error.message() : "another value", ".");
  std::map<std::string, OperatorTime, std::less<>> added;
  double averaging_us_per_mib = averaging_us_per_mib_;
  for (const auto& [key, value] : parsed.get_object()) {
    if (key == kAveraging) {
      averaging_us_per_mib = read_number(key, value);
    } else {
      added.emplace(key, read_time(key, value));
    }
  }
  for (auto& [key, time] : added) times_[key] = time;
  averaging_us_per_mib_ = averaging_us_per_mib;
}

}  // namespace smp::partitioner
