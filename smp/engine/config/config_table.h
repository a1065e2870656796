// Owns the table of configuration keys: one row per key.  Parsing, checks, printing and the page
// docs/configuration.md are derived from it; a new knob is one row in config_table.cpp and one field in smp/config.h.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "smp/config.h"

namespace smp::engine {

/// Where the value lives; monostate for a key that needs no field.
using Field = std::variant<std::monostate, bool Config::*, int64_t Config::*, double Config::*, std::string Config::*,
                           std::vector<double> Config::*, Pipeline Config::*, Parallelism Config::*, Checkpointing Config::*,
                           Bodies Config::*, StageKind Config::*, DeviceKind Config::*, CudaGraphs Config::*,
                           CostSource Config::*, Nonfinite Config::*, LogLevel Config::*>;

enum class Support {
  kWorks,     ///< steers smp
  kNoEffect,  ///< checked, then ignored: SageMaker scripts give it
  kNotYet,    ///< its feature does not exist: only the default is accepted
};

/// Numbers, also those of a list, from `least` to `most`; without `least` itself when `excludes_least`.
struct Range {
  double least = std::numeric_limits<double>::lowest();
  double most = std::numeric_limits<double>::max();
  bool excludes_least = false;
};

struct Key {
  std::string_view name;
  std::string_view alias = {};
  Field field = {};
  bool is_used_by_init = false;                   ///< else it is read when the first model is made, or later
  ConfigValue value_without_field = {};           ///< type and default of a key without field
  std::optional<ConfigValue> also_accepted = {};  ///< second neutral value of a kNotYet key
  Range range = {};                               ///< of numbers
  std::string_view word_for_auto = {};         ///< beside the range: how JSON writes kAutoMicrobatches, kAutoVirtualStages
  std::vector<std::string_view> choices = {};  ///< of words; of an enum: in order of enumerators
  Support support = Support::kWorks;
  bool is_printed = true;    ///< appears in Config::to_text
  std::string_view meaning;  ///< one sentence for docs/configuration.md
};

/// All keys, in the order in which they are printed: SageMaker's list first, then ours.
const std::vector<Key>& config_keys();

/// Whether smp::init has used the key's value in `config`, so that a second call comes too late to change it.
bool is_used_by_init(std::string_view key, const Config& config);

/// The key's value in `config`.
ConfigValue get(const Key& key, const Config& config);

/// Stores a value that check() accepts.
void set(const Key& key, const ConfigValue& value, Config& config);

/// The key's value in a default Config.
ConfigValue default_value(const Key& key);

/// What the key accepts, in words: "an integer, 1 or more".
std::string expectation(const Key& key);

/// nullopt when the key accepts the value, else the complaint: "expected an integer, got true".
std::optional<std::string> check(const Key& key, const ConfigValue& value);

/// The value as JSON: true, 4, 0.5, "simple".
std::string value_text(const ConfigValue& value);

}  // namespace smp::engine
