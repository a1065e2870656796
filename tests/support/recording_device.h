// A device that is none: its memory is the host's, and it writes down what it is given to do, and in which order.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstring>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/device.h"

namespace smp::support {

/// Each thread has a stream of its own, numbered by run_as(). An event is reached when told so, or when somebody waits.
class RecordingDevice final : public runtime::Device {
 public:
  /// count: of devices, of which use() makes one its thread's.
  explicit RecordingDevice(int count = 1, const runtime::DeviceLinks* links = nullptr)
      : Device(c10::kPrivateUse1, c10::DispatchKey::PrivateUse1, c10::DispatchKey::AutogradPrivateUse1,
               c10::DispatchKey::AutocastPrivateUse1),
        count_(count),
        links_(links) {}

  static void run_as(int stream) { stream_ = stream; }

  int count() const override { return count_; }
  void use(int index) const override { index_ = index; }
  c10::Device current() const override { return {type, static_cast<c10::DeviceIndex>(index_)}; }
  std::string model() const override { return "none"; }
  std::string identity() const override { return std::to_string(index_); }
  const runtime::DeviceLinks* links() const override { return links_; }

  c10::DataPtr allocate(int64_t num_bytes) const override {
    return c10::GetCPUAllocator()->allocate(static_cast<size_t>(num_bytes));
  }
  at::Tensor empty(at::IntArrayRef /*sizes*/, c10::ScalarType /*dtype*/) const override { return {}; }
  void copy(void* to, const void* from, int64_t num_bytes) const override {
    start_copy(to, from, num_bytes);
    note("waits");
  }
  c10::DataPtr allocate_pinned(int64_t num_bytes) const override {
    auto* memory = new Pinned{allocate(num_bytes), {}};
    void* const data = memory->bytes.get();
    return {data, memory, [](void* kept) { delete static_cast<Pinned*>(kept); }, c10::Device(c10::kCPU)};
  }
  void start_copy(void* to, const void* from, int64_t num_bytes) const override {
    if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
    note("copies");
  }
  void sum_in_order(const std::vector<const void*>& terms, void* sum, int64_t num_elements,
                    c10::ScalarType dtype) const override {
    note("sums");
    runtime::host().sum_in_order(terms, sum, num_elements, dtype);
  }
  int64_t free_bytes() const override { return 0; }
  void release_free_memory() const override {}

  runtime::Event record() const override {
    const std::lock_guard lock(mutex_);
    auto event = std::make_shared<int>(num_events_++);
    log_.push_back(std::to_string(stream_) + " records " + std::to_string(*event));
    return event;
  }
  void wait(const runtime::Event& event) const override {
    note("waits for " + number(event));
    reach(event);
  }
  bool has_reached(const runtime::Event& event) const override {
    const std::lock_guard lock(mutex_);
    return !event || has_reached_all_ || reached_.contains(event.get());
  }
  void go_on_behind(const runtime::Event& event) const override {
    if (event) note("behind " + number(event));
  }
  void reach(const runtime::Event& event) const {
    const std::lock_guard lock(mutex_);
    reached_.insert(event.get());
  }

  /// Blocks of pinned memory that somebody has.
  static int num_pinned() { return Pinned::number; }

  void reach_all() const { has_reached_all_ = true; }

  std::unique_ptr<runtime::DeviceClock> new_clock() const override { return runtime::host().new_clock(); }
  at::Generator default_generator() const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator new_generator() const override { return at::detail::createCPUGenerator(); }
  void seed(at::Generator& generator, uint64_t stream, uint64_t /*ordinal*/, runtime::Draws /*draws*/) const override {
    generator.set_current_seed(stream);
  }

  /// "stream does": what it was given since the last call.
  std::vector<std::string> take_log() const {
    const std::lock_guard lock(mutex_);
    return std::exchange(log_, {});
  }

 private:
  struct Pinned {
    struct Counted {
      Counted() { ++number; }
      ~Counted() { --number; }
      Counted(const Counted&) = delete;
      Counted& operator=(const Counted&) = delete;
    };
    c10::DataPtr bytes;
    Counted counted;
    static inline std::atomic<int> number = 0;
  };

  static std::string number(const runtime::Event& event) { return std::to_string(*static_cast<const int*>(event.get())); }
  void note(const std::string& does) const {
    const std::lock_guard lock(mutex_);
    log_.push_back(std::to_string(stream_) + " " + does);
  }

  static inline thread_local int stream_ = -1, index_ = 0;
  const int count_;
  const runtime::DeviceLinks* const links_;
  mutable std::mutex mutex_;
  mutable int num_events_ = 0;
  mutable std::vector<std::string> log_;
  mutable std::set<const void*> reached_;
  mutable std::atomic<bool> has_reached_all_ = false;
};

/// The device of all ranks while it lives.
class UseDevice {
 public:
  explicit UseDevice(const runtime::Device& device) { runtime::use_device(device); }
  ~UseDevice() { runtime::use_device(runtime::host()); }
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;
};

}  // namespace smp::support
