// Parameters, buffers and step counts of a model: gathered, taken locally, loaded.
#pragma once

#include <memory>
#include <string>

#include "runtime/exchange/state_exchange.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/state_dict.h"

namespace smp::engine {

/// Copies of everything on every rank of the pipeline. Collective over it.
StateDict gathered_state(const RankState& own, const Model& model);
/// What lives here, sharing the model's memory.
StateDict local_state(const RankState& own, const Model& model);

/// A state that has been checked against the model and not yet been written into it.
class ModelLoad {
 public:
  /// own_error: why this rank has no state, told on every rank. Collective over all ranks; throws
  /// c10::ValueError on all of them alike.
  ModelLoad(RankState& own, Model& model, const StateDict& state, bool strict, std::string own_error);
  /// Collective over all ranks. Where a rank of the first replica has put values off, the tensors wait for placement.
  void apply();

 private:
  RankState& own_;
  Model& model_;
  std::shared_ptr<runtime::StateExchange> exchange_;
};

}  // namespace smp::engine
