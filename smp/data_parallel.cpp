// The public side of gradient averaging; the work is done in smp/engine/replicas/replica_gradients.
#include "smp/data_parallel.h"

#include "smp/engine/state/model_state.h"
#include "smp/distributed_model.h"
#include "smp/comm.h"

namespace smp {

at::Tensor bf16_compress_hook(const GradientBucket& bucket) {
  return all_reduce_mean(bucket.gradients.to(at::kBFloat16), CommGroup::DP_GROUP)
      .to(bucket.gradients.scalar_type());
}

NoSync::NoSync(DistributedModelBase& model) : model_(engine::ModelAccess::shared(model)) {
  engine::refuse_in_body("NoSync", "Put the guard around the call of the step function.");
  ++model_->reduction.num_no_sync;
}

NoSync::~NoSync() { --model_->reduction.num_no_sync; }

}  // namespace smp
