// What save_state and load_state are made of, whatever the types of model and optimizer.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "smp/optimizer_state.h"
#include "smp/state_dict.h"

namespace smp {

namespace engine {
struct Model;
}

/// What the caller wants to find again: epoch, position in the data, best loss. Keys and values may hold any bytes, such as
/// the state of a random generator.
using UserContent = std::map<std::string, std::string>;

namespace state_file_internal {
void save(const std::string& folder, const StateDict& model, const OptimizerState& optimizer, const UserContent& user);

/// What load_state does, in steps that each throw before anything changes.
class Reader {
 public:
  explicit Reader(const std::string& folder);
  ~Reader();
  void check_model(engine::Model& model);
  void apply_model();
  const OptimizerState& optimizer() const;
  const UserContent& user() const;

 private:
  struct Contents;
  std::unique_ptr<Contents> contents_;
};
}  // namespace state_file_internal

}  // namespace smp
