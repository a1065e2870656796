#include "partitioner/memory/gradient_memory.h"

#include <utility>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/graph/tensor_bytes.h"

namespace smp::partitioner {

void GradientMemory::enter(ValueId id, ByteMeter& meter) {
  const int32_t gradient = make(0, meter);  // of another stage, or the executor's
  ++gradients_[gradient].num_holders;
  add(id, gradient, meter);
}

void GradientMemory::pass(const Node& node, const OperatorRow& row, ValueId id, ValueId output, ByteMeter& meter) {
  add(id, made_for(node, row, id, output, meter), meter);
}

void GradientMemory::forget(ValueId id, ByteMeter& meter) {
  const int32_t gradient = std::exchange(of_value_[id], kNone);
  if (gradient != kNone) let_go(gradient, meter);
}

int32_t GradientMemory::make(int64_t asked_bytes, ByteMeter& meter) {
  const int64_t bytes = rounded_up(asked_bytes, allocation_bytes_);
  meter.hold(bytes);
  gradients_.push_back({bytes, 1});
  return static_cast<int32_t>(gradients_.size()) - 1;
}

// With one holder more than before.
int32_t GradientMemory::made_for(const Node& node, const OperatorRow& row, ValueId id, ValueId output, ByteMeter& meter) {
  const TensorSpec& spec = graph_.values[id].spec;
  const bool agrees =
      spec.num_elements() == graph_.values[output].spec.num_elements() && spec.dtype == graph_.values[output].spec.dtype;
  const bool is_same = agrees && (moves_nothing(graph_, node) || row.gradient == GradientForm::kSame);
  if (!is_same && row.gradient != GradientForm::kExpanded) return make(spec.num_bytes(), meter);
  const int32_t gradient = of_value_[output];
  ++gradients_[gradient].num_holders;
  return gradient;
}

// Takes over one hold of `gradient`. A second one is added to the first in place, or into a new tensor where the first is
// shared.
void GradientMemory::add(ValueId id, int32_t gradient, ByteMeter& meter) {
  int32_t& known = of_value_[id];
  if (known == kNone) {
    known = gradient;
    return;
  }
  if (gradients_[known].num_holders > 1) {
    const int32_t sum = make(graph_.values[id].spec.num_bytes(), meter);
    let_go(known, meter);
    known = sum;
  }
  let_go(gradient, meter);
}

void GradientMemory::let_go(int32_t gradient, ByteMeter& meter) {
  if (--gradients_[gradient].num_holders == 0) meter.drop(gradients_[gradient].bytes);
}

}  // namespace smp::partitioner
