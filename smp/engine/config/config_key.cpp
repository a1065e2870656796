// Owns what is done with one row of the configuration table: reading, storing, checking, wording.
#include <c10/util/Exception.h>

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <boost/json/string.hpp>
#include <charconv>
#include <type_traits>

#include "smp/engine/config/config_table.h"

namespace smp::engine {
namespace {

std::string number_text(double number) {
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof digits, number).ptr;
  return {digits, end};
}

// Only bounds that mean something are worded; the others keep arithmetic from overflowing.
constexpr double kLargestWordedBound = 65535;

std::string range_text(const Range& range) {
  if (range.least == Range{}.least) return "";
  const std::string least = number_text(range.least);
  if (range.most <= kLargestWordedBound) return ", " + least + " to " + number_text(range.most);
  return range.excludes_least ? ", above " + least : ", " + least + " or more";
}

/// The numbers in a value, by themselves or in a list.
std::vector<double> numbers_of(const ConfigValue& value) {
  if (const auto* list = std::get_if<std::vector<double>>(&value)) return *list;
  if (const auto* integer = std::get_if<int64_t>(&value)) return {static_cast<double>(*integer)};
  if (const auto* number = std::get_if<double>(&value)) return {*number};
  return {};
}

constexpr int64_t kAuto = kAutoMicrobatches;  // of every key with a word for it
static_assert(kAuto == kAutoVirtualStages);

/// The default is left out, so that configurations with the same values are equal.
void store_without_effect(const Key& key, const ConfigValue& value, Config& config) {
  const std::string name(key.name);
  config.without_effect.erase(name);
  if (value != key.value_without_field) config.without_effect.emplace(name, value);
}

template <typename Member>
using MemberType = std::remove_reference_t<decltype(std::declval<Config&>().*std::declval<Member>())>;

}  // namespace

ConfigValue get(const Key& key, const Config& config) {
  return std::visit(
      [&](auto member) -> ConfigValue {
        using Member = decltype(member);
        if constexpr (std::is_same_v<Member, std::monostate>) {
          const auto given = config.without_effect.find(std::string(key.name));
          return given == config.without_effect.end() ? key.value_without_field : given->second;
        } else if constexpr (std::is_enum_v<MemberType<Member>>) {
          const auto position = static_cast<size_t>(config.*member);
          // A cast outside the enumerators has no word; check() then refuses the empty one.
          return position < key.choices.size() ? std::string(key.choices[position]) : "";
        } else {
          if constexpr (std::is_same_v<MemberType<Member>, int64_t>) {
            if (!key.word_for_auto.empty() && config.*member == kAuto) return std::string(key.word_for_auto);
          }
          return config.*member;
        }
      },
      key.field);
}

void set(const Key& key, const ConfigValue& value, Config& config) {
  std::visit(
      [&](auto member) {
        using Member = decltype(member);
        if constexpr (std::is_same_v<Member, std::monostate>) {
          if (key.support == Support::kNoEffect) store_without_effect(key, value, config);
        } else {
          using Type = MemberType<Member>;
          if constexpr (std::is_enum_v<Type>) {
            const auto word = std::ranges::find(key.choices, std::get<std::string>(value));
            TORCH_INTERNAL_ASSERT(word != key.choices.end(), key.name);
            config.*member = static_cast<Type>(word - key.choices.begin());
          } else if constexpr (std::is_same_v<Type, int64_t>) {
            const auto* number = std::get_if<int64_t>(&value);
            config.*member = number == nullptr ? kAuto : *number;
          } else {
            config.*member = std::get<Type>(value);
          }
        }
      },
      key.field);
}

ConfigValue default_value(const Key& key) { return get(key, Config{}); }

std::string expectation(const Key& key) {
  if (!key.choices.empty()) {
    std::string words;
    for (const auto& choice : key.choices) {
      words.append(words.empty() ? "\"" : ", \"").append(choice).append(1, '"');
    }
    return "one of " + words;
  }
  switch (default_value(key).index()) {
    case 0:
      return "true or false";
    case 1:
      return "an integer" + range_text(key.range) +
             (key.word_for_auto.empty() ? "" : ", or \"" + std::string(key.word_for_auto) + "\"");
    case 2:
      return "a number" + range_text(key.range);
    case 4:
      return "a list of numbers" + range_text(key.range);
    default:
      return "a string";
  }
}

std::optional<std::string> check(const Key& key, const ConfigValue& value) {
  const auto* word = std::get_if<std::string>(&value);
  if (word != nullptr && !key.word_for_auto.empty() && *word == key.word_for_auto) return std::nullopt;
  const ConfigValue fallback = default_value(key);
  bool is_accepted = value.index() == fallback.index();
  if (is_accepted && !key.choices.empty()) {
    is_accepted = std::ranges::find(key.choices, std::get<std::string>(value)) != key.choices.end();
  }
  for (const double number : is_accepted ? numbers_of(value) : std::vector<double>{}) {
    if (number > key.range.most && key.range.most > kLargestWordedBound) {
      return "expected at most " + number_text(key.range.most) + ", got " + value_text(value);
    }
    // Written so that a NaN is refused.
    const bool is_enough = key.range.excludes_least ? number > key.range.least : number >= key.range.least;
    is_accepted = is_accepted && is_enough && number <= key.range.most;
  }
  if (!is_accepted) return "expected " + expectation(key) + ", got " + value_text(value);
  if (key.support == Support::kNotYet && value != fallback && value != key.also_accepted) {
    return value_text(value) + " is not available yet. Remove the key or set it to " + value_text(fallback);
  }
  return std::nullopt;
}

std::string value_text(const ConfigValue& value) {
  switch (value.index()) {
    case 0:
      return std::get<bool>(value) ? "true" : "false";
    case 1:
      return std::to_string(std::get<int64_t>(value));
    case 2:
      return number_text(std::get<double>(value));
    case 4: {
      std::string list;
      for (double number : std::get<std::vector<double>>(value)) {
        list.append(list.empty() ? "" : ",").append(number_text(number));
      }
      return "[" + list + "]";
    }
    default:
      return boost::json::serialize(boost::json::string(std::get<std::string>(value)));
  }
}

}  // namespace smp::engine
