// The public side of gradient averaging; the work is done in smp/engine/replicas/replica_gradients.
#include "smp/data_parallel.h"

#include "smp/comm.h"
#include "smp/distributed_model.h"
#include "smp/engine/engine.h"

namespace smp {

at::Tensor bf16_compress_hook(const GradientBucket& bucket) {
  return all_reduce_mean(bucket.gradients.to(at::kBFloat16), CommGroup::DP_GROUP).to(bucket.gradients.scalar_type());
}

NoSync::NoSync(DistributedModelBase& model) : model_(ModelAccess::shared(model)) { engine::begin_no_sync(*model_); }

NoSync::~NoSync() { engine::end_no_sync(*model_); }

}  // namespace smp
