// The seam to a device: its memory, keys, random numbers, order and time. Here alone the library names a kind of device,
// takes the address of a tensor's data or the host's clock (tests/arrows/check_device.py lists the exceptions). The CPU is a
// file beside this one; CUDA is a folder, and a library of its own that is loaded when it is asked for (loaded_devices.h).
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/device/clock.h"
#include "runtime/device/graph.h"
#include "runtime/device/lane.h"
#include "runtime/device/memory.h"

namespace smp::runtime {

class DeviceLinks;

/// A point in the order of what a device was given to do. Null: it has been reached.
using Event = std::shared_ptr<void>;

/// How many random numbers an operator takes.
enum class Draws : uint8_t {
  kByThread,   ///< what each of its threads draws
  kByElement,  ///< one for each element of something large: an attention with dropout, for each query and key
};

/// One kind of device. Which one of its kind a rank has is LibTorch's current device, of each of its threads.
class Device {
 public:
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const c10::DeviceType type;  // autocast is asked by it, too
  const c10::DispatchKey backend, autograd, autocast;

  /// How many of its kind this process may use.
  virtual int count() const = 0;
  /// Makes the `index`-th LibTorch's current device of this thread.
  virtual void use(int index) const = 0;
  /// That one, as its tensors name it.
  virtual c10::Device current() const = 0;
  /// Its kind, as its maker calls it.
  virtual std::string model() const = 0;
  /// That one, among all of its kind on all hosts.
  virtual std::string identity() const = 0;

  static constexpr int64_t kAlignment = 64;  // of the memory that it allocates
  virtual c10::DataPtr allocate(int64_t num_bytes) const = 0;
  /// As at::empty, past the dispatcher.
  virtual at::Tensor empty(at::IntArrayRef sizes, c10::ScalarType dtype) const = 0;
  /// Between two places of it, in order with all else that it is given to do. Either may be memory of the host; then it has
  /// been copied on return.
  virtual void copy(void* to, const void* from, int64_t num_bytes) const = 0;
  /// Memory of the host from which and to which start_copy() is fast.
  virtual c10::DataPtr allocate_pinned(int64_t num_bytes) const = 0;
  /// As copy(), and returns at once also where memory of the host is one side, which stays as it is until the device has
  /// come there.
  virtual void start_copy(void* to, const void* from, int64_t num_bytes) const = 0;
  /// Writes the elementwise sum of `terms`, added in their order, to `sum`, which may be one of them: all its memory, in
  /// order with all else that it is given to do. Float, Double, Long; BFloat16 and Half are summed in float32 and rounded
  /// once. The same bits of numbers on every kind of device.
  virtual void sum_in_order(const std::vector<const void*>& terms, void* sum, int64_t num_elements,
                            c10::ScalarType dtype) const = 0;
  /// Memory that could still be allocated.
  virtual int64_t free_bytes() const = 0;
  /// Gives memory that is free, and that an allocator keeps, back to whoever else may want it.
  virtual void release_free_memory() const = 0;

  /// The end of what this thread has given the device to do so far: of LibTorch's current stream.
  virtual Event record() const = 0;
  /// Returns when the device has come there.
  virtual void wait(const Event& event) const = 0;
  virtual bool has_reached(const Event& event) const = 0;
  /// What this thread gives it to do from now on comes behind `event`, of any thread. Returns at once.
  virtual void go_on_behind(const Event& event) const = 0;
  /// Nanoseconds on this process's clock when all that the device was given to do is done.
  int64_t now_ns() const;
  virtual std::unique_ptr<DeviceClock> new_clock() const = 0;

  /// Null: this kind of device does one thing after another.
  virtual std::unique_ptr<DeviceLane> new_lane() const { return nullptr; }
  /// Nothing is recorded in it yet. It may use the memory that tensors of `before` have freed, with which it is replayed in
  /// turn, in the order of recording. Null: this kind of device has none.
  virtual std::unique_ptr<DeviceGraph> new_graph(const DeviceGraph* /*before*/) const { return nullptr; }
  /// Between devices of its kind, one for each rank. Null: by way of the host alone.
  virtual const DeviceLinks* links() const { return nullptr; }

  virtual at::Generator default_generator() const = 0;
  virtual at::Generator new_generator() const = 0;
  /// Puts `generator` where the `ordinal`-th random operator of `stream` draws: numbers of streams and operators are
  /// independent of each other, and the same whatever else is drawn.
  virtual void seed(at::Generator& generator, uint64_t stream, uint64_t ordinal, Draws draws) const = 0;

 protected:
  constexpr Device(c10::DeviceType its_type, c10::DispatchKey its_backend, c10::DispatchKey its_autograd,
                   c10::DispatchKey its_autocast)
      : type(its_type), backend(its_backend), autograd(its_autograd), autocast(its_autocast) {}
  ~Device() = default;
};

/// What is done on the host whatever computes: files, control messages, construction of modules.
const Device& host();
/// What this rank computes on: the host until use_device.
const Device& this_ranks_device();
/// For all ranks of the process, before they hold any tensors.
void use_device(const Device& device);
/// Whether that has been called.
bool is_device_chosen();
/// Throws c10::NotImplementedError for a kind of device that is neither.
const Device& device_of(const DeviceMemory& memory);
const Device& device_holding(const at::Tensor& tensor);

bool is_on_host(const at::Tensor& tensor);
bool is_on_this_ranks_device(const at::Tensor& tensor);
/// Defined, and on one of the two.
bool is_within_reach(const at::Tensor& tensor);

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
