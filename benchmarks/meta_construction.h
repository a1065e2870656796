// Builds modules that have geometry but no data, for models larger than the machine.
#pragma once

#include "runtime/capture/interceptor.h"
#include "runtime/capture/meta/meta_kernels.h"

namespace smp::benchmarks {

/// Inside InterceptScope(MetaConstruction) every tensor is made on the meta device.
class MetaConstruction : public runtime::Interceptor {
 public:
  MetaConstruction() { runtime::register_meta_kernels(); }
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
};

}  // namespace smp::benchmarks
