// Sources of keys, one laid over the other, and what is wrong with each.
#include "smp/engine/config/config_draft.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "partitioner/cost/device_table.h"
#include "partitioner/partition/edit_distance.h"
#include "smp/engine/config/config_table.h"
#include "smp/engine/files/input_file.h"
#include "smp/engine/files/json_object.h"

namespace smp::engine {
namespace {

std::string in_quotes(std::string_view word) { return std::string(1, '"').append(word).append(1, '"'); }

const Key* find_key(std::string_view word) {
  const auto& keys = config_keys();
  const auto key =
      std::ranges::find_if(keys, [&](const Key& k) { return k.name == word || (!k.alias.empty() && k.alias == word); });
  return key == keys.end() ? nullptr : &*key;
}

std::string unknown_key(std::string_view word) {
  std::vector<std::string_view> known;
  for (const Key& key : config_keys()) {
    known.push_back(key.name);
    if (!key.alias.empty()) known.push_back(key.alias);
  }
  const std::string_view suggestion = nearest(word, known);
  const std::string text = "unknown key " + in_quotes(word);
  return suggestion.empty() ? text : text + "; did you mean " + in_quotes(suggestion) + "?";
}

// A long value is cut, at the start of a UTF-8 character.
std::string short_text(const boost::json::value& json) {
  constexpr size_t kLongest = 60;
  if (json.is_double()) return value_text(json.get_double());
  std::string text = boost::json::serialize(json);
  if (text.size() <= kLongest) return text;
  size_t end = kLongest;
  while ((text[end] & 0xC0) == 0x80) --end;
  return text.substr(0, end) + "...";
}

// Programs write whole numbers as 5e8 or 4.0 too.
std::optional<int64_t> to_integer(const boost::json::value& json) {
  constexpr double kLargestExact = 9007199254740992.0;
  if (json.is_int64()) return json.get_int64();
  if (!json.is_double()) return std::nullopt;
  const double number = json.get_double();
  if (std::trunc(number) != number || std::abs(number) > kLargestExact) return std::nullopt;
  return static_cast<int64_t>(number);
}

// nullopt when the JSON value is of another type than the key's.
std::optional<ConfigValue> to_value(const boost::json::value& json, const Key& key) {
  const ConfigValue like = default_value(key);
  if (json.is_string() && !key.word_for_auto.empty()) return std::string(json.get_string());
  if (std::holds_alternative<bool>(like) && json.is_bool()) return json.get_bool();
  if (std::holds_alternative<int64_t>(like)) {
    if (const auto integer = to_integer(json)) return *integer;
  }
  if (std::holds_alternative<double>(like) && json.is_number()) return json.to_number<double>();
  if (std::holds_alternative<std::vector<double>>(like) && json.is_array()) {
    std::vector<double> numbers;
    for (const auto& element : json.get_array()) {
      if (!element.is_number()) return std::nullopt;
      numbers.push_back(element.to_number<double>());
    }
    return numbers;
  }
  if (std::holds_alternative<std::string>(like) && json.is_string()) {
    return std::string(json.get_string());
  }
  return std::nullopt;
}

}  // namespace

std::string_view nearest(std::string_view word, const std::vector<std::string_view>& known) {
  constexpr size_t kLongestWord = 64;  // nobody misspells that much; keeps the table small
  if (word.size() > kLongestWord) return {};
  std::string_view best;
  size_t best_distance = std::max<size_t>(1, word.size() / 3) + 1;
  for (const std::string_view candidate : known) {
    const size_t distance = partitioner::edit_distance(word, candidate);
    if (distance < best_distance) {
      best = candidate;
      best_distance = distance;
    }
  }
  return best;
}

void ConfigDraft::complain(const std::string& source, const std::string& problem) {
  problems_.push_back(source + ": " + problem);
}

void ConfigDraft::lay(const std::string& source, const Config& config) {
  for (const auto& [name, value] : config.without_effect) {
    const Key* key = find_key(name);
    if (key == nullptr || key->support != Support::kNoEffect || !std::holds_alternative<std::monostate>(key->field)) {
      complain(source, "without_effect: expected keys of docs/configuration.md without effect, got " + in_quotes(name));
    }
  }
  for (const Key& key : config_keys()) {
    const ConfigValue value = get(key, config);
    if (value == default_value(key)) continue;
    if (const auto problem = check(key, value)) {
      complain(source, std::string(key.name) + ": " + *problem);
      continue;
    }
    set(key, value, config_);
    sources_[key.name] = source;
  }
}

void ConfigDraft::lay_json(const std::string& source, std::string_view text) {
  const JsonObject object = parse_json_object(text);
  if (object.problem) return complain(source, *object.problem);
  for (const auto& key : object.repeated_keys) {
    complain(source, in_quotes(key) + ": expected once, got several times. Keep one");
  }
  std::map<std::string_view, std::string> spellings;
  for (const auto& [word, json] : object.members) {
    const Key* key = find_key(word);
    if (key == nullptr) {
      complain(source, unknown_key(word));
      continue;
    }
    if (json.is_null()) continue;
    const auto value = to_value(json, *key);
    const auto problem = value ? check(*key, *value) : "expected " + expectation(*key) + ", got " + short_text(json);
    if (problem) {
      complain(source, std::string(word) + ": " + *problem);
      continue;
    }
    const auto [earlier, is_first] = spellings.emplace(key->name, word);
    if (!is_first && get(*key, config_) != *value) {
      complain(source, in_quotes(earlier->second) + " and " + in_quotes(word) +
                           " name the same key: expected one value, got " + value_text(get(*key, config_)) + " and " +
                           value_text(*value) + ". Remove one");
      continue;
    }
    set(*key, *value, config_);
    sources_[key->name] = source;
  }
}

void ConfigDraft::lay_json_or_file(const std::string& source, const std::string& text_or_path) {
  const size_t first = text_or_path.find_first_not_of(" \t\r\n");
  if (first != std::string::npos && text_or_path[first] == '{') {
    return lay_json(source, text_or_path);
  }
  std::string text;
  try {
    text = InputFile(text_or_path, "expected a JSON object or the path of a JSON file").read_all();
  } catch (const c10::Error& error) {
    return complain(source, error.what_without_backtrace());
  }
  lay_json(source + " (" + text_or_path + ")", text);
}

std::string ConfigDraft::source_of(std::string_view key) const {
  const auto source = sources_.find(key);
  return source == sources_.end() ? "default" : source->second;
}

namespace {

/// MiB in "40GiB"; nothing where that is no whole number of them.
std::optional<int64_t> mebibytes_of(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 1 || number > (int64_t{1} << 30)) return std::nullopt;
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  for (const auto& [name, size] :
       {std::pair("MiB", int64_t{1}), std::pair("GiB", int64_t{1} << 10), std::pair("TiB", int64_t{1} << 20)}) {
    if (unit == name) return number * size;
  }
  return std::nullopt;
}

}  // namespace

void ConfigDraft::read_memory_limit() {
  if (config_.memory_limit.empty()) return;
  const std::optional<int64_t> mebibytes = mebibytes_of(config_.memory_limit);
  if (!mebibytes) {
    return complain(source_of("memory_limit"),
                    "memory_limit: expected a whole number of MiB, GiB or TiB such as \"40GiB\", got " +
                        in_quotes(config_.memory_limit));
  }
  if (config_.memory_limit_mb != 0 && config_.memory_limit_mb != *mebibytes) {
    return complain(source_of("memory_limit"),
                    "memory_limit: expected none beside memory_limit_mb=" + std::to_string(config_.memory_limit_mb) + " (" +
                        source_of("memory_limit_mb") + "), got " + in_quotes(config_.memory_limit));
  }
  config_.memory_limit_mb = *mebibytes;
}

void ConfigDraft::check_together() {
  read_memory_limit();
  const int64_t degree = config_.pipeline_parallel_degree;
  if (degree > 0 && config_.default_partition >= degree) {
    complain(source_of("default_partition"),
             "default_partition: expected less than pipeline_parallel_degree=" + std::to_string(degree) + " (" +
                 source_of("pipeline_parallel_degree") + "), got " + std::to_string(config_.default_partition));
  }
  if (!config_.planned_device.empty()) {
    if (partitioner::find_known_device(config_.planned_device) == nullptr) {
      complain(source_of("planned_device"), "planned_device: expected one of " + partitioner::known_device_names() +
                                                ", got " + in_quotes(config_.planned_device));
    }
    if (config_.cost == CostSource::kMeasured) {
      complain(source_of("planned_device"), "planned_device: expected none with cost=\"measured\" (" + source_of("cost") +
                                                "), which takes the times of this machine, got " +
                                                in_quotes(config_.planned_device));
    }
  }
  if (config_.parallelism == Parallelism::kManual) return;
  const auto chosen_already = [this](const char* key, const std::string& expected, const std::string& got) {
    complain(source_of(key), std::string(key) + ": expected " + expected + " with parallelism=\"auto\" (" +
                                 source_of("parallelism") + "), got " + got);
  };
  if (degree > 0) chosen_already("pipeline_parallel_degree", "none", std::to_string(degree));
  if (!config_.auto_partition) chosen_already("auto_partition", "true", "false");
  for (const char* key : {"rank_speed", "rank_memory_limit_mb"}) {
    const auto& numbers = std::string_view(key) == "rank_speed" ? config_.rank_speed : config_.rank_memory_limit_mb;
    if (!numbers.empty()) chosen_already(key, "equal ranks", value_text(numbers));
  }
}

Config ConfigDraft::finish() {
  check_together();
  std::string list;
  for (const auto& problem : problems_) list.append("\n  ").append(problem);
  TORCH_CHECK_VALUE(problems_.empty(), "configuration: ", problems_.size(), problems_.size() == 1 ? " error" : " errors",
                    list, "\nCorrect the sources named above; docs/configuration.md lists every key.");
  return config_;
}

Config ConfigDraft::finish_under(const EnvironmentLookup& lookup) {
  const auto ours = lookup("SMP_CONFIG");
  if (ours && !ours->empty()) lay_json_or_file("SMP_CONFIG", *ours);
  const auto sagemaker = lookup("SM_HP_MP_PARAMETERS");
  if (sagemaker && !sagemaker->empty()) lay_json("SM_HP_MP_PARAMETERS", *sagemaker);
  return finish();
}

}  // namespace smp::engine
