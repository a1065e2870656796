// Config: sources laid over each other, and how it is printed.
#include "smp/config.h"

#include <cstdlib>

#include "smp/engine/config/config_draft.h"
#include "smp/engine/config/config_table.h"

namespace smp {
namespace {

using engine::Key;
using engine::Support;

constexpr const char* kArgument = "argument";

// A word is printed bare, as SageMaker does.
std::string plain_text(const ConfigValue& value) {
  const auto* word = std::get_if<std::string>(&value);
  return word != nullptr ? *word : engine::value_text(value);
}

std::string table_row(const Key& key) {
  std::string row = "| `";
  row += key.name;
  row += '`';
  if (!key.alias.empty()) row.append(" (`").append(key.alias).append("`)");
  row.append(" | ").append(engine::expectation(key));
  row.append(" | `").append(engine::value_text(default_value(key))).append("` | ");
  return row.append(key.meaning).append(" |\n");
}

std::string table_of(Support support) {
  std::string table = "| key (alias) | value | default | meaning |\n|---|---|---|---|\n";
  for (const Key& key : engine::config_keys()) {
    if (key.support == support) table += table_row(key);
  }
  return table;
}

}  // namespace

EnvironmentLookup environment_lookup() {
  return [](std::string_view name) -> std::optional<std::string> {
    const char* value = std::getenv(std::string(name).c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

Config Config::from_json(std::string_view text) {
  engine::ConfigDraft draft;
  draft.lay_json(kArgument, text);
  return draft.finish();
}

Config Config::resolve(const Config& argument, const EnvironmentLookup& lookup) {
  engine::ConfigDraft draft;
  draft.lay(kArgument, argument);
  return draft.finish_under(lookup);
}

Config Config::resolve_json(std::string_view argument, const EnvironmentLookup& lookup) {
  engine::ConfigDraft draft;
  draft.lay_json(kArgument, argument);
  return draft.finish_under(lookup);
}

std::string Config::to_text() const {
  std::string text = "Configuration parameters:";
  for (const Key& key : engine::config_keys()) {
    if (!key.is_printed) continue;
    text.append("\n  ").append(key.name).append(": ").append(plain_text(get(key, *this)));
  }
  return text;
}

std::string Config::to_json() const {
  std::string json;
  for (const Key& key : engine::config_keys()) {
    if (key.support == Support::kNotYet) continue;
    json.append(json.empty() ? "{\"" : ",\"").append(key.name);
    json.append("\":").append(engine::value_text(get(key, *this)));
  }
  return json + "}";
}

std::vector<std::string> Config::differences(const Config& a, const Config& b) {
  std::vector<std::string> lines;
  for (const Key& key : engine::config_keys()) {
    const auto ours = get(key, a), theirs = get(key, b);
    if (ours == theirs || std::holds_alternative<std::monostate>(key.field)) continue;
    lines.push_back(std::string(key.name) + ": " + plain_text(ours) + " against " + plain_text(theirs));
  }
  return lines;
}

std::string Config::reference_table() {
  return "### Keys that steer smp\n\n" + table_of(Support::kWorks) +
         "\n### Keys without effect\n\n"
         "Accepted so that SageMaker configurations run unchanged.\n\n" +
         table_of(Support::kNoEffect) +
         "\n### Keys of features that do not exist yet\n\n"
         "Only the default is accepted.\n\n" +
         table_of(Support::kNotYet);
}

}  // namespace smp
