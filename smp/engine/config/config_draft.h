// Owns the merging of configuration sources: reads each, checks it, remembers who named which key,
// and collects every problem so that the user sees all of them at once.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "smp/config.h"

namespace smp::engine {

class ConfigDraft {
 public:
  /// Takes over every field of `config` that differs from its default.
  void lay(const std::string& source, const Config& config);

  /// Takes over every key that the JSON object `text` names.
  void lay_json(const std::string& source, std::string_view text);

  /// Takes over the JSON that `text_or_path` is or that the file of that name holds.
  void lay_json_or_file(const std::string& source, const std::string& text_or_path);

  /// The merged configuration.  Throws c10::ValueError with all problems of all sources.
  Config finish();

  /// The same, with SMP_CONFIG and then SM_HP_MP_PARAMETERS laid over it: both override the program.
  Config finish_under(const EnvironmentLookup& lookup);

 private:
  void complain(const std::string& source, const std::string& problem);
  void read_memory_limit();
  void check_together();
  std::string source_of(std::string_view key) const;

  Config config_;
  std::map<std::string_view, std::string> sources_;
  std::vector<std::string> problems_;
};

/// The entry of `known` that `word` is most likely a misspelling of; empty when none is near.
std::string_view nearest(std::string_view word, const std::vector<std::string_view>& known);

}  // namespace smp::engine
