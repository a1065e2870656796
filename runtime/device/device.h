// The seam to a device: its memory, keys, random numbers and time. Here alone the library names a kind of device, takes the
// address of a tensor's data or the host's clock (tests/arrows/check_device.py lists the exceptions). A kind of device is
// one file beside this one.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string_view>

#include "runtime/device/memory.h"

namespace smp::runtime {

/// A point in the order of what a device was given to do. Null: it has been reached.
using Event = std::shared_ptr<void>;

/// One kind of device. Which one of its kind a rank has is LibTorch's current device: no index is written down anywhere.
class Device {
 public:
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const c10::DeviceType type;  // autocast is asked by it, too
  const c10::DispatchKey backend, autograd, autocast;

  static constexpr int64_t kAlignment = 64;  // of the memory that it allocates
  virtual c10::DataPtr allocate(int64_t num_bytes) const = 0;
  /// As at::empty, past the dispatcher.
  virtual at::Tensor empty(at::IntArrayRef sizes, c10::ScalarType dtype) const = 0;
  /// Either may be memory of the host; then it has been copied on return.
  virtual void copy(void* to, const void* from, int64_t num_bytes) const = 0;
  /// Memory that could still be allocated.
  virtual int64_t free_bytes() const = 0;
  /// Gives memory that is free, and that an allocator keeps, back to whoever else may want it.
  virtual void release_free_memory() const = 0;

  /// The end of what the device was given to do so far.
  virtual Event record() const = 0;
  /// Returns when the device has come there.
  virtual void wait(const Event& event) const = 0;
  /// Nanoseconds on this process's clock when all that the device was given to do is done.
  int64_t now_ns() const;

  virtual at::Generator default_generator() const = 0;
  virtual at::Generator new_generator() const = 0;

 protected:
  constexpr Device(c10::DeviceType its_type, c10::DispatchKey its_backend, c10::DispatchKey its_autograd,
                   c10::DispatchKey its_autocast)
      : type(its_type), backend(its_backend), autograd(its_autograd), autocast(its_autocast) {}
  ~Device() = default;
};

/// What is done on the host whatever computes: files, control messages, construction of modules, sums of transports.
const Device& host();
/// What this rank computes on.
const Device& this_ranks_device();
/// Throws c10::NotImplementedError for a tensor of a kind of device that the library does not know.
const Device& device_holding(const at::Tensor& tensor);

bool is_on_host(const at::Tensor& tensor);
bool is_on_this_ranks_device(const at::Tensor& tensor);

/// Where the data begin, on the tensor's device, to be read.
const void* data_of(const at::Tensor& tensor);
/// The same of a storage; null for one without data.
const void* data_of(const c10::Storage& storage);
/// The data of a dense tensor, to be read and written to.
DeviceMemory memory_of(const at::Tensor& dense);
/// The data of a dense tensor on the host, as long as it lives. Throws c10::ValueError for one elsewhere.
std::string_view bytes_of(const at::Tensor& dense);
std::string_view bytes_of(const c10::Storage& storage);
/// Replaces the data of a dense tensor by as many bytes of the host.
void set_bytes(const at::Tensor& dense, std::string_view bytes);
/// A new tensor of bytes on the host.
at::Tensor tensor_of_bytes(std::string_view bytes);

}  // namespace smp::runtime
