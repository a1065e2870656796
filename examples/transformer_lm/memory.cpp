// Two measures of one thing, begun and ended together.
#include "examples/transformer_lm/memory.h"

#include "examples/common/resident_memory.h"

namespace transformer_lm {

StepMemory::StepMemory(bool counts_first_step)
    : counts_first_step_(counts_first_step),
      tensors_(std::make_unique<examples::TensorMemory>()),
      idle_resident_bytes_(examples::resident_bytes()) {}

void StepMemory::after_step(int64_t step) {
  constexpr int64_t kLastCounted = 5;
  if (step == 1 && !counts_first_step_) {
    tensors_->forget_peak();
    examples::forget_resident_peak();
  }
  if (tensors_) tensor_bytes_ = tensors_->peak_bytes();
  if (step >= kLastCounted) tensors_.reset();
}

void StepMemory::finish() {
  tensors_.reset();
  resident_bytes_ = examples::peak_resident_bytes() - idle_resident_bytes_;
}

}  // namespace transformer_lm
