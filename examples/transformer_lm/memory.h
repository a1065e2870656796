// What the training steps take of this rank's memory: of tensors, and as the kernel counts it.
#pragma once

#include <cstdint>
#include <memory>

#include "examples/common/tensor_memory.h"

namespace transformer_lm {

/// Most memory at once in training steps, above what there was before the model.
class StepMemory {
 public:
  /// Starts to count; make it before the model. The first step counts only where it does not begin with the whole model on
  /// every rank.
  explicit StepMemory(bool counts_first_step = false);

  /// Call it at the end of each training step, counted from 1. Tensors are counted until the fifth,
  /// because counting costs time; steps of one size take the same.
  void after_step(int64_t step);
  /// Call it at the end of training, before anything else takes memory.
  void finish();

  int64_t tensor_bytes() const { return tensor_bytes_; }
  /// Growth of the process: tensors, and code and workspaces that LibTorch and MPI load on first use.
  int64_t resident_bytes() const { return resident_bytes_; }

 private:
  bool counts_first_step_;
  std::unique_ptr<examples::TensorMemory> tensors_;
  int64_t idle_resident_bytes_;
  int64_t tensor_bytes_ = 0;
  int64_t resident_bytes_ = 0;
};

}  // namespace transformer_lm
