// The CPU: its memory is the host's, and its stream is the order of the program.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <fstream>
#include <string>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include "runtime/device/cpu_sum.h"
#include "runtime/device/device.h"
#include "runtime/device/random.h"

namespace smp::runtime {
namespace {

static_assert(c10::gAlignment >= Device::kAlignment, "memory comes from LibTorch's allocator, so that its profilers see it");

class Clock final : public DeviceClock {
 public:
  void mark() override { marks_ns_.push_back(host().now_ns()); }
  std::vector<double> take_us() override {
    std::vector<double> us;
    for (size_t i = 1; i < marks_ns_.size(); ++i) us.push_back(static_cast<double>(marks_ns_[i] - marks_ns_[i - 1]) * 1e-3);
    marks_ns_.clear();
    return us;
  }

 private:
  std::vector<int64_t> marks_ns_;
};

class Cpu final : public Device {
 public:
  constexpr Cpu() : Device(c10::kCPU, c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutocastCPU) {}

  int count() const override { return 1; }
  void use(int /*index*/) const override {}
  c10::Device current() const override { return type; }
  std::string model() const override {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);) {
      if (line.starts_with("model name")) return line.substr(line.find(':') + 1);
    }
    return "unknown";
  }
  std::string identity() const override { return {}; }  // ranks share it

  c10::DataPtr allocate(int64_t num_bytes) const override {
    return c10::GetCPUAllocator()->allocate(static_cast<size_t>(num_bytes));
  }
  at::Tensor empty(at::IntArrayRef sizes, c10::ScalarType dtype) const override {
    return at::detail::empty_cpu(sizes, dtype);
  }
  void copy(void* to, const void* from, int64_t num_bytes) const override {
    if (num_bytes > 0) std::memcpy(to, from, static_cast<size_t>(num_bytes));
  }
  c10::DataPtr allocate_pinned(int64_t num_bytes) const override { return allocate(num_bytes); }
  void start_copy(void* to, const void* from, int64_t num_bytes) const override { copy(to, from, num_bytes); }
  void sum_in_order(const std::vector<const void*>& terms, void* sum, int64_t num_elements,
                    c10::ScalarType dtype) const override {
    sum_on_cpu(terms, sum, num_elements, dtype);
  }
  int64_t free_bytes() const override { return int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE); }
  void release_free_memory() const override {
    // A sanitizer's own allocator leaves glibc's without arenas to walk.
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    malloc_trim(0);
#endif
  }

  Event record() const override { return {}; }
  void wait(const Event& /*event*/) const override {}
  bool has_reached(const Event& /*event*/) const override { return true; }
  void go_on_behind(const Event& /*event*/) const override {}

  std::unique_ptr<DeviceClock> new_clock() const override { return std::make_unique<Clock>(); }

  at::Generator default_generator() const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator new_generator() const override { return at::detail::createCPUGenerator(); }
  void seed(at::Generator& generator, uint64_t stream, uint64_t ordinal, Draws /*draws*/) const override {
    generator.set_current_seed(operator_seed(stream, ordinal));
  }
};

constinit const Cpu the_cpu;  // before all other initialisation and without a guard: it is asked for with each operator

constinit std::atomic<const Device*> chosen = &the_cpu;
constinit std::atomic<bool> is_chosen = false;

}  // namespace

const Device& host() { return the_cpu; }

const Device& this_ranks_device() { return *chosen.load(std::memory_order_relaxed); }

void use_device(const Device& device) {
  chosen.store(&device);
  is_chosen.store(true);
}

bool is_device_chosen() { return is_chosen.load(); }

}  // namespace smp::runtime
