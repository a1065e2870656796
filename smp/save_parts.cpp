// From models and optimizers to what a save holds of them, and back.
#include "smp/save_parts.h"

#include <c10/util/Exception.h>

#include <regex>

#include "smp/engine/engine.h"

namespace smp::state_file_internal {
namespace {

void check_name(const std::string& name) {
  static const std::regex good("[A-Za-z0-9][A-Za-z0-9._-]{0,127}");
  TORCH_CHECK_VALUE(
      std::regex_match(name, good),
      "SaveParts: expected a name of 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first, got '", name,
      "'.");
}

}  // namespace

Parts checked(const SaveParts& parts) {
  TORCH_CHECK_VALUE(!parts.models.empty(), "SaveParts: expected a model or more, got none.");
  Parts checked;
  for (const auto& [name, model] : parts.models) check_name(name), checked.models.emplace(name, model.handle);
  for (const auto& [name, optimizer] : parts.optimizers)
    check_name(name), checked.optimizers.emplace(name, optimizer.handle);
  return checked;
}

SavedStates states_of(const Parts& parts) {
  SavedStates states;
  for (const auto& [name, model] : parts.models) {
    states.models.emplace(name, engine::local_state_dict(*model));
    if (!engine::is_partitioned(*model)) states.unplaced.insert(name);
  }
  for (const auto& [name, optimizer] : parts.optimizers)
    states.optimizers.emplace(name, engine::local_state_dict(*optimizer));
  return states;
}

UserContent load(const std::string& folder, const Parts& parts) {
  Reader reader(folder, keys_of(parts.models), keys_of(parts.optimizers));
  for (const auto& [name, model] : parts.models) reader.check(name, *model);
  for (const auto& [name, optimizer] : parts.optimizers) reader.check(name, *optimizer);
  reader.apply();
  return reader.user();
}

}  // namespace smp::state_file_internal
