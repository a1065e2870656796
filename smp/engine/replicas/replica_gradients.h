// Which gradients of a step are averaged over replicas, and when each of them is final.
#pragma once

#include <map>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "partitioner/schedule/schedule.h"
#include "runtime/executor/executor.h"
#include "runtime/gradients/gradient_reducer.h"
#include "smp/engine/models/models.h"
#include "smp/engine/replicas/replica_step.h"

namespace smp::engine {

/// By model: kAverages or kKeeps.
std::vector<Averaging> reductions(const Models& models);
/// The same of a step of these programs, with kMakesNone for models that no backward of theirs reaches.
std::vector<Averaging> reductions(const Models& models, const std::vector<std::shared_ptr<Program>>& programs);
/// What must not differ between any two ranks in a training step, by model.
std::vector<ModelSettings> settings_of(const Models& models);
/// After a training step: counts it where it made gradients and backward_passes_per_step asks for it.
void count_pass(const Models& models, const std::vector<Averaging>& reduced);
/// Before a step of other replicas: drops the gradients that these have had, so that they are not summed twice.
void drop_averaged(const Models& models, const std::vector<Averaging>& reduced);

/// One training step's averaging on this rank. Gradients of a parameter are final after the last
/// weight gradients of the column that belong to a stage which reads it.
class ReplicaGradients : public runtime::BackwardObserver {
 public:
  /// Makes the reducers of models that have none yet, or whose parameters that require gradients have
  /// changed. Collective over the replicas; throws c10::ValueError on all alike.
  ReplicaGradients(Context& context, const Models& models, const std::vector<Averaging>& reduced, int divisor);
  /// Before the first action.
  void begin(const std::vector<partitioner::Action>& column, const std::vector<runtime::MicrobatchRun>& microbatches);
  void before_backward(const partitioner::Action& action) override;
  void after_weight_gradients(const partitioner::Action& action) override;
  /// After the last action, and when tied weights are summed. Collective over the replicas.
  void finish();

 private:
  struct Reducing {
    Model* model;
    std::vector<at::Tensor> frozen;  // a gradient is of earlier steps, which may have kept it
  };
  /// Parameters that become final in one backward and its weight gradients, by model.
  struct Final {
    std::map<size_t, std::vector<size_t>> parameters;
    /// By the next accumulation after the backward has begun. Not where it is several, nor where other computations, of a
    /// table that came with its plan, stand between it and its weight gradients: theirs may accumulate first.
    bool is_next = false;
  };
  void add(Model& model, const std::unordered_set<const void*>& taken);
  void make_reducer(Model& model, std::vector<at::Tensor> parameters);
  void average_frozen(const Reducing& reducing) const;

  Context& context_;
  const Models& models_;
  int divisor_;  // of the sums over replicas
  std::vector<Reducing> reducing_;
  std::map<std::pair<int, int>, Final> final_;  // by stage and microbatch
};

}  // namespace smp::engine
