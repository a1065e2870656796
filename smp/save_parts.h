// Several models and optimizers in one save.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "smp/distributed_model.h"
#include "smp/distributed_optimizer.h"
#include "smp/state_reader.h"

namespace smp {

/// What one save holds, each under a name of its own: 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first,
/// the same on every rank. Copies nothing: models and optimizers outlive it.
///
///   const smp::SaveParts parts{.models = {{"generator", generator}, {"critic", critic}},
///                              .optimizers = {{"generator", generator_optimizer}, {"critic", critic_optimizer}}};
///   smp::save_state("run/step_400", parts);
///   smp::load_state("run/step_400", parts);   // all of them, or none
struct SaveParts {
  struct Model {
    Model(DistributedModelBase& model) : handle(ModelAccess::shared(model)) {}  // NOLINT: a name and a model are a part
    std::shared_ptr<engine::Model> handle;
  };
  struct Optimizer {
    template <class Wrapped>
    Optimizer(DistributedOptimizer<Wrapped>& optimizer) : handle(OptimizerAccess::of(optimizer)) {}  // NOLINT: likewise
    optimizer_internal::Handle handle;
  };
  std::map<std::string, Model> models{};
  std::map<std::string, Optimizer> optimizers{};
};

namespace state_file_internal {
/// The same for the engine, where "" is the name of an only model, and of an only optimizer.
struct Parts {
  std::map<std::string, std::shared_ptr<engine::Model>> models{};
  std::map<std::string, optimizer_internal::Handle> optimizers{};
};
/// Throws c10::ValueError for names that are none, and without a model.
Parts checked(const SaveParts& parts);
/// Copies of what lives on this rank. Between a load before the first step and that step collective over all ranks.
SavedStates states_of(const Parts& parts);
UserContent load(const std::string& folder, const Parts& parts);

inline Parts parts_of(const DistributedModelBase& model) { return {.models = {{"", ModelAccess::shared(model)}}}; }
template <class Optimizer>
Parts parts_of(const DistributedModelBase& model, const DistributedOptimizer<Optimizer>& optimizer) {
  return {.models = {{"", ModelAccess::shared(model)}}, .optimizers = {{"", OptimizerAccess::of(optimizer)}}};
}
}  // namespace state_file_internal

}  // namespace smp
