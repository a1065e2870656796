// A DistributedOptimizer that is alive, as the engine keeps it.
#pragma once

#include <cstdint>
#include <memory>

#include "smp/engine/models/models.h"
#include "smp/engine/optimizer_view.h"

namespace smp::engine {

class OptimizerLoad;
class ParameterOrigins;

struct Optimizer {
  std::unique_ptr<OptimizerView> view;
  std::shared_ptr<Model> model;
  uint64_t num_steps = 0;                    // since all ranks held the same updates
  bool has_local_state = false;              // and none of parameters that live elsewhere
  bool loads_at_once = false;                // does not wait with `pending`
  std::shared_ptr<OptimizerLoad> pending{};  // a state that was loaded before the first step
  int num_watched = 0;                       // updates, in which no parameters were mixed
  std::shared_ptr<ParameterOrigins> origins{};
};

}  // namespace smp::engine
