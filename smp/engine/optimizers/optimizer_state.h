// The state of an optimizer over a model: gathered, taken locally, loaded; and its groups as text.
#pragma once

#include <memory>
#include <string>

#include "runtime/exchange/state_exchange.h"
#include "smp/engine/optimizers/optimizer.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/optimizer_state.h"

namespace smp::engine {

/// Throws c10::ValueError naming `caller` for an optimizer whose state is not known.
StateView& known_state(const Optimizer& optimizer, const char* caller);

/// Copies of everything on every rank of the pipeline. Collective over it.
OptimizerState gathered_state(const RankState& own, const Optimizer& optimizer);
/// What lives here, sharing the optimizer's memory.
OptimizerState local_state(const RankState& own, const Optimizer& optimizer);

/// Options, and the state of what lives here, from replica `source` to all. Collective over the replicas.
void broadcast_local_state(const RankState& own, Optimizer& optimizer, int source);

/// What the ranks of `group` have together, on each. Collective over it.
OptimizerEntries gathered_entries(const OptimizerEntries& own, runtime::Transport& group);

/// Once its model is partitioned: forgets what it has made for parameters of other ranks (Adagrad, in its constructor).
void forget_state_of_others(const RankState& own, Optimizer& optimizer);
/// And gives what it keeps values where they have been put off.
void keep_local_state(const RankState& own, Optimizer& optimizer);

/// Kind and groups as JSON, numbers exact. Equal states have equal texts.
std::string groups_to_json(const OptimizerState& state);
/// Reads what groups_to_json wrote into `state`. Throws c10::ValueError for any other text.
void groups_from_json(const std::string& json, OptimizerState& state);

class OptimizerLoad;

/// The two halves of DistributedOptimizer::load_state_dict: what it throws, and what it changes. Each is collective over all
/// ranks.
std::shared_ptr<OptimizerLoad> checked_load(RankState& own, Optimizer& optimizer, const OptimizerState& state);
void apply_load(RankState& own, Optimizer& optimizer, std::shared_ptr<OptimizerLoad> load);
/// What was loaded before the first step goes to the ranks that the parameters have now. Collective over all ranks.
void take_over_loaded(const RankState& own, Optimizer& optimizer);

/// A state that has been checked against the optimizer and not yet been written into it.
class OptimizerLoad {
 public:
  /// Collective over all ranks; throws c10::ValueError on all of them alike.
  OptimizerLoad(RankState& own, Optimizer& optimizer, const OptimizerState& state);
  /// Learning rates and the like.
  void apply_options();
  /// What the optimizer keeps per parameter, on the ranks that hold it. Collective over all ranks.
  void apply_state(const Models& models);

 private:
  std::string difference(const OptimizerState& want) const;
  std::string wrong_fields(const std::string& parameter, const at::Tensor& tensor, const OptionValues& options) const;

  Optimizer& optimizer_;
  StateView& view_;
  runtime::StateExchange exchange_;
  OptimizerState groups_;  // to load, without entries
};

}  // namespace smp::engine
