// LibTorch's rules, by the arguments of a call.
#include "runtime/capture/devices.h"

#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {
namespace {

bool is_on_host(const at::Tensor& tensor, const Bindings& bindings) {
  return tensor.device().type() == host().type && bindings.find_storage(tensor) == nullptr;
}

bool goes_to_other(const OperatorInfo& info) {
  return (info.name == "aten::to" && info.overload == "other") || info.name == "aten::type_as";
}

// Such an operator works tensor by tensor, and its results would be on one device here.
void check_lists(const OperatorInfo& info, const c10::IValue* arguments, const Bindings& bindings) {
  if (!info.name.starts_with("aten::_foreach_")) return;
  bool any_here = false, any_on_host = false;
  for (int i = 0; i < info.num_arguments; ++i) {
    if (!arguments[i].isTensorList()) continue;
    for_each_tensor(arguments[i], [&](int, const at::Tensor& tensor) {
      if (tensor.dim() > 0) (is_on_host(tensor, bindings) ? any_on_host : any_here) = true;
    });
  }
  TORCH_CHECK_NOT_IMPLEMENTED(!any_here || !any_on_host, info.name,
                              ": expected lists of tensors on one device, got one that holds tensors of the host and of the "
                              "rank's device. Call it for each kind, or tensor by tensor.");
}

}  // namespace

const Device& device_of_results(const OperatorInfo& info, const torch::jit::Stack& stack, const Bindings& bindings) {
  const Device& device = this_ranks_device();
  if (device.type == host().type || info.name == "smp::opaque") return device;
  const auto* arguments = &stack.end()[-info.num_arguments];
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    if (!info.argument_is_device[i] || !arguments[i].isDevice()) continue;
    return arguments[i].toDevice().type() == host().type ? host() : device;
  }
  check_lists(info, arguments, bindings);
  // Numbers that operators compute with, fill in or put in places do not decide, and what else is written into a tensor
  // comes behind it.
  bool is_known = false, is_for_host = true;
  for (size_t i = goes_to_other(info) ? 1 : 0; i < info.argument_is_device.size() && !is_known; ++i) {
    for_each_tensor(arguments[i], [&](int, const at::Tensor& tensor) {
      if (is_known) return;
      is_known = tensor.dim() > 0;
      is_for_host = is_on_host(tensor, bindings) && (is_known || is_for_host);
    });
  }
  return is_for_host ? host() : device;
}

const c10::OperatorHandle& copying_between_devices(const c10::OperatorHandle& op, torch::jit::Stack& stack,
                                                   const Bindings& bindings) {
  static const c10::OperatorHandle to_other = c10::Dispatcher::singleton().findSchemaOrThrow("aten::to", "other");
  if (this_ranks_device().type == host().type) return op;
  const std::string& name = op.operator_name().name;
  if (name != "aten::to" && name != "aten::type_as") return op;
  const OperatorInfo& info = operator_info(op);
  const bool is_from_host = is_on_host(stack[stack.size() - static_cast<size_t>(info.num_arguments)].toTensor(), bindings);
  if (is_from_host == (device_of_results(info, stack, bindings).type == host().type)) return op;
  if (name == "aten::type_as") {
    torch::jit::push(stack, /*non_blocking=*/false, /*copy=*/true, /*memory_format=*/c10::IValue());
    return to_other;
  }
  const auto copy = op.schema().argumentIndexWithName("copy");
  if (copy) stack[stack.size() - static_cast<size_t>(info.num_arguments - *copy)] = true;
  return op;
}

}  // namespace smp::runtime
