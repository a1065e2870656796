// Gradients of tied weights, which several ranks of a pipeline hold: summed over its stages.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "runtime/capture/bindings.h"
#include "runtime/placement/placement.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Sums the gradients of tied weights over the pipeline ranks that hold them, once per step, in rank order. Gradients of
/// earlier steps are set aside at construction and added by finish(), so that they are not summed twice. Where one rank
/// alone trains a weight, the others only reading it, its microbatches add to a copy of them instead, in the order of a loop
/// on one process. All ranks have the same earlier gradients, as finish() leaves them. Without a finish() that returns (the
/// step failed), the destructor puts them back in place of what the step has added.
class TiedGradients {
 public:
  /// The pipeline ranks that train a weight in this step, ascending; the same on all of them.
  using TrainedOn = std::function<std::vector<int>(const std::string& name)>;

  TiedGradients(const TensorHomes& homes, const Bindings& bindings, const TrainedOn& trained_on, Transport& pipeline);
  ~TiedGradients();
  TiedGradients(const TiedGradients&) = delete;
  TiedGradients& operator=(const TiedGradients&) = delete;
  /// Collective over the ranks that share a tied weight. Throws CommError, and changes no gradient then.
  void finish();

 private:
  struct Tied {
    at::Tensor parameter;
    std::vector<int> ranks;
    bool has_one_trainer = false;
    at::Tensor earlier;
  };
  at::Tensor summed(const Tied& tied);

  Transport& pipeline_;
  std::vector<Tied> tied_;  // none after finish()
};

}  // namespace smp::runtime
