// Rewrites the Device arguments of operators.
#include "benchmarks/meta_construction.h"

#include <algorithm>

#include "runtime/capture/operator_info.h"

namespace smp::benchmarks {

void MetaConstruction::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const runtime::OperatorInfo& info = runtime::operator_info(op);
  const auto first = stack.end() - info.num_arguments;
  const bool is_factory =
      std::none_of(first, stack.end(), [](const c10::IValue& v) { return v.isTensor() || v.isTensorList(); });
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    c10::IValue& argument = first[static_cast<std::ptrdiff_t>(i)];
    // A factory without a device would take the CPU; the others take their tensors'.
    if (info.argument_is_device[i] && (argument.isDevice() || is_factory)) {
      argument = c10::Device(c10::kMeta);
    }
  }
  op.callBoxed(stack);
}

}  // namespace smp::benchmarks
