// Gradients that several ranks hold: tied weights summed over stages, everything averaged over replicas.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/placement.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Sums the gradients of tied weights over the pipeline ranks that hold them, once per step, in rank order. Gradients
/// of earlier steps are set aside at construction and added by finish(), so that they are not summed twice.
class TiedGradients {
 public:
  TiedGradients(const Owners& owners, const Bindings& bindings, Transport& pipeline);
  /// Collective over the ranks that share a tied weight.
  void finish();

 private:
  struct Tied {
    at::Tensor parameter;
    std::vector<int> ranks;
    at::Tensor earlier;
  };
  Transport& pipeline_;
  std::vector<Tied> tied_;
};

/// Replaces every gradient by its mean over the replicas, in buckets of up to `bucket_bytes` per dtype. Parameters
/// without a gradient here but with one elsewhere count as zero; without one anywhere they keep none. Collective.
void average_gradients(const std::vector<at::Tensor>& parameters, Transport& replicas, int64_t bucket_bytes);

}  // namespace smp::runtime
