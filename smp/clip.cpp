// Clipping by the engine, which knows the gradients of all ranks.
#include "smp/clip.h"

#include "smp/distributed_model.h"
#include "smp/engine/engine.h"

double smp::clip_grad_norm_(DistributedModelBase& model, double max_norm, double norm_type) {
  return engine::clip_grad_norm(ModelAccess::of(model), max_norm, norm_type);
}
