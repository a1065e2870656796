// What save_state and load_state are made of, whatever the types of model and optimizer.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "smp/optimizer_state.h"
#include "smp/state_dict.h"

namespace smp {

namespace engine {
struct Model;
struct Optimizer;
}  // namespace engine

/// What the caller wants to find again: epoch, position in the data, best loss. Keys and values may hold any bytes, such as
/// the state of a random generator.
using UserContent = std::map<std::string, std::string>;

/// Who writes a save's files: the ranks of dp_rank() 0, or on each host those that it has of each stage, so that a host that
/// has all stages has a whole save in folders that hosts do not share.
enum class SaveCopies { kOne, kOnEachHost };

namespace state_file_internal {
/// What this rank has of all that a save holds, by the names of SaveParts; "" where it has one model, or one optimizer.
struct SavedStates {
  std::map<std::string, StateDict> models{};
  std::map<std::string, OptimizerState> optimizers{};
  std::set<std::string> unplaced{};  // models that no step has used, of which ranks may still have different ones
};
template <class Map>
std::vector<std::string> keys_of(const Map& map) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : map) keys.push_back(key);
  return keys;
}
void save(const std::string& folder, const SavedStates& states, const UserContent& user);

/// What load_state does, in steps that each throw before anything changes. All but optimizer() and user() are collective
/// over all ranks.
class Reader {
 public:
  /// models, optimizers: the names of all that will be checked, the same on all ranks.
  Reader(const std::string& folder, const std::vector<std::string>& models, const std::vector<std::string>& optimizers);
  ~Reader();
  void check(const std::string& name, engine::Model& model);
  void check(const std::string& name, engine::Optimizer& optimizer);
  /// Loads all that was checked.
  void apply();
  /// What this rank has read of an optimizer. Throws c10::ValueError, on every rank alike, where the save has none of the
  /// name.
  const OptimizerState& optimizer(const std::string& name) const;
  const UserContent& user() const;

 private:
  struct Contents;
  std::unique_ptr<Contents> contents_;
};
}  // namespace state_file_internal

}  // namespace smp
