// The state of an optimizer over a model: gathered, taken locally, loaded; and its groups as text.
#pragma once

#include <string>

#include "runtime/exchange/state_exchange.h"
#include "smp/engine/conductor.h"
#include "smp/engine/state/optimizer_fields.h"
#include "smp/optimizer_state.h"

namespace smp::engine {

/// Copies of everything on every rank of the pipeline. Collective over it.
OptimizerState gathered_state(const Conductor& own, const Model& model,
                              torch::optim::Optimizer& optimizer);
/// What lives here, sharing the optimizer's memory.
OptimizerState local_state(const Conductor& own, const Model& model,
                           torch::optim::Optimizer& optimizer);

/// Options, and the state of what lives here, from replica `source` to all. Collective over the replicas.
void broadcast_local_state(Conductor& own, const Model& model, torch::optim::Optimizer& optimizer, int source);

/// Kind and groups as JSON, numbers exact. Equal states have equal texts.
std::string groups_to_json(const OptimizerState& state);
/// Reads what groups_to_json wrote into `state`. Throws c10::ValueError for any other text.
void groups_from_json(const std::string& json, OptimizerState& state);

/// A state that has been checked against the optimizer and not yet been written into it.
class OptimizerLoad {
 public:
  /// own_error: why this rank has no state, told on every rank. Collective over all ranks; throws
  /// c10::ValueError on all of them alike.
  OptimizerLoad(Conductor& own, const Model& model, torch::optim::Optimizer& optimizer,
                const OptimizerState& state, std::string own_error);
  /// Learning rates and the like.
  void apply_options();
  /// What the optimizer keeps per parameter, on the ranks that hold it. Collective over all ranks.
  void apply_state();

 private:
  std::string difference(const OptimizerState& want) const;
  std::string wrong_fields(const std::string& parameter, const at::Tensor& tensor,
                           const OptionValues& options) const;

  Conductor& own_;
  const Model& model_;
  torch::optim::Optimizer& optimizer_;
  const OptimizerFields& fields_;
  runtime::StateExchange exchange_;
  OptimizerState groups_;  // to load, without entries
};

}  // namespace smp::engine
