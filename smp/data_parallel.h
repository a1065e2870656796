// How replicas share their gradients: steps that do not share, and a hook in place of the mean.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "smp/hooks.h"

namespace smp {

class DistributedModelBase;
namespace engine {
struct Model;
}

/// The mean over replicas, sent as bfloat16: half the bytes, 8 bits of precision.
///
///   model.register_comm_hook(smp::bf16_compress_hook);
at::Tensor bf16_compress_hook(const GradientBucket& bucket);

/// While it lives, the steps of `model` do not average gradients over replicas: each adds up its own, and the model's next
/// step without a guard averages the sums. On every rank alike; the one of pp_rank() 0 counts.
///
///   {
///     smp::NoSync guard(model);
///     train_step(first, targets);
///   }
///   train_step(second, targets);   // gradients of both, averaged
class NoSync {
 public:
  /// Throws c10::ValueError inside a step body.
  explicit NoSync(DistributedModelBase& model);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<engine::Model> model_;
};

}  // namespace smp
