// What is alike on all devices.
#include "runtime/device/device.h"

#include <c10/util/Exception.h>

#include <chrono>

namespace smp::runtime {

int64_t Device::now_ns() const {
  wait(record());
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

const Device* find_device(c10::DeviceType type) {
  for (const Device* device : {&this_ranks_device(), &host()}) {
    if (type == device->type) return device;
  }
  return nullptr;
}

}  // namespace

const Device& device_of(const DeviceMemory& memory) {
  const Device* device = find_device(memory.device);
  TORCH_CHECK_NOT_IMPLEMENTED(device != nullptr, "expected memory of the host or of this rank's device (",
                              this_ranks_device().type, "), got memory of ", memory.device, ".");
  return *device;
}

const Device& device_holding(const at::Tensor& tensor) {
  const Device* device = find_device(tensor.device().type());
  TORCH_CHECK_NOT_IMPLEMENTED(device != nullptr, "expected a tensor on the host or on this rank's device (",
                              c10::DeviceTypeName(this_ranks_device().type, /*lower_case=*/true), "), got one on ",
                              tensor.device(), ". Move it there: tensor.to(parameter.device()).");
  return *device;
}

bool is_on_host(const at::Tensor& tensor) { return tensor.device().type() == host().type; }

bool is_within_reach(const at::Tensor& tensor) {
  return tensor.defined() && (is_on_host(tensor) || is_on_this_ranks_device(tensor));
}

bool is_on_this_ranks_device(const at::Tensor& tensor) {
  const Device& device = this_ranks_device();
  return tensor.device().type() == device.type && (device.type == host().type || tensor.device() == device.current());
}

const void* data_of(const at::Tensor& tensor) { return tensor.const_data_ptr(); }

const void* data_of(const c10::Storage& storage) {
  return storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
}

DeviceMemory memory_of(const at::Tensor& dense) {
  return {dense.mutable_data_ptr(), static_cast<int64_t>(dense.nbytes()), dense.device().type()};
}

std::string_view bytes_of(const at::Tensor& dense) {
  TORCH_CHECK_VALUE(is_on_host(dense), "bytes of a tensor: expected one on the host, got ", dense.toString(), " on ",
                    dense.device(), ". Bring it there first: tensor.cpu().");
  return {static_cast<const char*>(dense.const_data_ptr()), dense.nbytes()};
}

std::string_view bytes_of(const c10::Storage& storage) {
  TORCH_CHECK_VALUE(storage.device_type() == host().type, "bytes of a storage: expected one on the host, got one on ",
                    storage.device(), ". Bring its tensor there first: tensor.cpu().");
  return {static_cast<const char*>(storage.data()), storage.nbytes()};
}

void set_bytes(const at::Tensor& dense, std::string_view bytes) {
  TORCH_INTERNAL_ASSERT(dense.nbytes() == bytes.size(), bytes.size(), " bytes for ", dense.nbytes());
  if (!bytes.empty()) device_holding(dense).copy(dense.mutable_data_ptr(), bytes.data(), static_cast<int64_t>(bytes.size()));
}

at::Tensor tensor_of_bytes(std::string_view bytes) {
  at::Tensor tensor = host().empty({static_cast<int64_t>(bytes.size())}, c10::ScalarType::Byte);
  set_bytes(tensor, bytes);
  return tensor;
}

}  // namespace smp::runtime
