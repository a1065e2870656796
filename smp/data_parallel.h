// How replicas share their gradients: options of a model, steps that do not share, and hooks in
// place of the mean.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

namespace smp {

class DistributedModelBase;
namespace engine {
struct Model;
}

/// Gradients of several parameters on their way to the other replicas.
struct GradientBucket {
  at::Tensor
      gradients;      // [number of elements], a copy: zeros where a parameter has no gradient here
  int64_t index = 0;  // of the step's buckets, in the order in which they leave
  bool is_last = false;
};

/// Takes the place of the mean over replicas: returns what every replica puts in place of
/// `gradients`, same shape and type, the same values on each. Runs on every rank, for the same
/// buckets in the same order, so it may call collectives over CommGroup::DP_GROUP.
using CommHook = std::function<at::Tensor(const GradientBucket&)>;

/// The mean over replicas, sent as bfloat16: half the bytes, 8 bits of precision.
///
///   model.register_comm_hook(smp::bf16_compress_hook);
at::Tensor bf16_compress_hook(const GradientBucket& bucket);

/// While it lives, the steps of `model` do not average gradients over replicas: each adds up its
/// own, and the model's next step without a guard averages the sums. On every rank alike; the one of
/// pp_rank() 0 counts.
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
