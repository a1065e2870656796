// LibTorch's rules, by the arguments of a call.
#include "runtime/capture/devices.h"

#include "runtime/libtorch/boxed_tensors.h"

namespace smp::runtime {
namespace {

bool is_on_host(const at::Tensor& tensor, const Bindings& bindings) {
  return tensor.device().type() == host().type && bindings.find_storage(tensor) == nullptr;
}

}  // namespace

const Device& device_of_results(const OperatorInfo& info, const torch::jit::Stack& stack, const Bindings& bindings) {
  const Device& device = this_ranks_device();
  if (device.type == host().type) return device;
  const auto* arguments = &stack.end()[-info.num_arguments];
  for (size_t i = 0; i < info.argument_is_device.size(); ++i) {
    if (!info.argument_is_device[i] || !arguments[i].isDevice()) continue;
    return arguments[i].toDevice().type() == host().type ? host() : device;
  }
  // to(other) and type_as(other) go where that is.
  const size_t first = (info.name == "aten::to" && info.overload == "other") || info.name == "aten::type_as" ? 1 : 0;
  bool is_of_device = false;
  for (size_t i = first; i < info.argument_is_device.size(); ++i) {
    for_each_tensor(arguments[i],
                    [&](int, const at::Tensor& tensor) { is_of_device = is_of_device || !is_on_host(tensor, bindings); });
  }
  return is_of_device ? device : host();
}

void copy_between_devices(const c10::OperatorHandle& op, torch::jit::Stack& stack, const Bindings& bindings) {
  if (this_ranks_device().type == host().type || op.operator_name().name != "aten::to") return;
  const auto copy = op.schema().argumentIndexWithName("copy");
  if (!copy) return;
  const OperatorInfo& info = operator_info(op);
  const auto* arguments = &stack.end()[-info.num_arguments];
  const bool is_from_host = is_on_host(arguments[0].toTensor(), bindings);
  const bool is_for_host = device_of_results(info, stack, bindings).type == host().type;
  if (is_from_host != is_for_host) stack[stack.size() - static_cast<size_t>(info.num_arguments - *copy)] = true;
}

}  // namespace smp::runtime
