// CUDA: LibTorch's caching allocator, its current device and stream of the thread, and its generators.
#include <ATen/Context.h>
#include <ATen/OpMathType.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/cuda/PinnedMemoryAllocator.h>
#include <ATen/ops/from_blob.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "runtime/device/cuda/cuda_graph.h"
#include "runtime/device/cuda/nccl_links.h"
#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

bool is_of_host(const void* data) {
  cudaPointerAttributes attributes{};
  C10_CUDA_CHECK(cudaPointerGetAttributes(&attributes, data));
  return attributes.type == cudaMemoryTypeUnregistered || attributes.type == cudaMemoryTypeHost;
}

class Lane final : public DeviceLane {
 public:
  void enter() override {
    rest_ = c10::cuda::getCurrentCUDAStream();
    c10::cuda::setCurrentCUDAStream(own_);
  }
  void leave() noexcept override { c10::cuda::setCurrentCUDAStream(rest_); }
  void join() override {
    at::cuda::CUDAEvent now;
    now.record(own_);
    now.block(rest_);
  }
  void share(const c10::Storage& memory) override {
    c10::cuda::CUDACachingAllocator::recordStream(memory.data_ptr(), rest_);
  }

 private:
  const c10::cuda::CUDAStream own_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/true);
  c10::cuda::CUDAStream rest_ = own_;
};

class Clock final : public DeviceClock {
 public:
  void mark() override {
    if (num_marks_ == events_.size()) events_.emplace_back(cudaEventDefault);  // with the time
    events_[num_marks_++].record();
  }
  std::vector<double> take_us() override {
    std::vector<double> us;
    if (num_marks_ > 0) events_[num_marks_ - 1].synchronize();
    for (size_t i = 1; i < num_marks_; ++i) us.push_back(1e3 * events_[i - 1].elapsed_time(events_[i]));
    num_marks_ = 0;
    return us;
  }

 private:
  std::vector<at::cuda::CUDAEvent> events_;
  size_t num_marks_ = 0;
};

class Cuda final : public Device {
 public:
  constexpr Cuda()
      : Device(c10::kCUDA, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA) {}

  int count() const override { return c10::cuda::device_count(); }
  void use(int index) const override { c10::cuda::set_device(static_cast<c10::DeviceIndex>(index)); }
  c10::Device current() const override { return {type, c10::cuda::current_device()}; }
  std::string model() const override { return at::cuda::getCurrentDeviceProperties()->name; }
  std::string identity() const override {
    const cudaUUID_t& uuid = at::cuda::getCurrentDeviceProperties()->uuid;
    return {uuid.bytes, sizeof uuid.bytes};
  }

  c10::DataPtr allocate(int64_t num_bytes) const override {
    return allocator::get()->allocate(static_cast<size_t>(num_bytes));
  }
  at::Tensor empty(at::IntArrayRef sizes, c10::ScalarType dtype) const override {
    return at::Tensor(at::detail::empty_cuda(sizes, dtype, current(), std::nullopt));
  }
  void copy(void* to, const void* from, int64_t num_bytes) const override {
    start_copy(to, from, num_bytes);
    if (num_bytes > 0 && (is_of_host(to) || is_of_host(from))) c10::cuda::getCurrentCUDAStream().synchronize();
  }
  c10::DataPtr allocate_pinned(int64_t num_bytes) const override {
    return at::cuda::getPinnedMemoryAllocator()->allocate(static_cast<size_t>(num_bytes));
  }
  void start_copy(void* to, const void* from, int64_t num_bytes) const override {
    if (num_bytes == 0) return;
    const auto stream = c10::cuda::getCurrentCUDAStream();
    C10_CUDA_CHECK(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, stream));
  }
  void sum_in_order(const std::vector<const void*>& terms, void* sum, int64_t num_elements,
                    c10::ScalarType dtype) const override {
    if (num_elements == 0) return;
    const auto tensor = [&](const void* data) {
      return at::from_blob(const_cast<void*>(data), {num_elements}, at::TensorOptions(current()).dtype(dtype));
    };
    at::Tensor total = tensor(terms.front()).to(at::toOpMathType(dtype), /*non_blocking=*/false, /*copy=*/true);
    for (size_t i = 1; i < terms.size(); ++i) total.add_(tensor(terms[i]));
    tensor(sum).copy_(total);
  }
  int64_t free_bytes() const override {
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    const auto stats = allocator::getDeviceStats(c10::cuda::current_device());
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return static_cast<int64_t>(free) + stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
  }
  void release_free_memory() const override { allocator::emptyCache(); }

  Event record() const override {
    auto event = std::make_shared<at::cuda::CUDAEvent>();  // without timing
    event->record();
    return event;
  }
  void wait(const Event& event) const override {
    if (event) static_cast<at::cuda::CUDAEvent*>(event.get())->synchronize();
  }
  bool has_reached(const Event& event) const override {
    return !event || static_cast<at::cuda::CUDAEvent*>(event.get())->query();
  }
  void go_on_behind(const Event& event) const override {
    if (event) static_cast<at::cuda::CUDAEvent*>(event.get())->block(c10::cuda::getCurrentCUDAStream());
  }

  std::unique_ptr<DeviceClock> new_clock() const override { return std::make_unique<Clock>(); }

  std::unique_ptr<DeviceLane> new_lane() const override { return std::make_unique<Lane>(); }
  std::unique_ptr<DeviceGraph> new_graph(const DeviceGraph* before) const override { return make_cuda_graph(before); }
  const DeviceLinks* links() const override { return nccl_links(); }

  at::Generator default_generator() const override { return at::cuda::detail::getDefaultCUDAGenerator(); }
  at::Generator new_generator() const override { return at::cuda::detail::createCUDAGenerator(); }
  void seed(at::Generator& generator, uint64_t stream, uint64_t ordinal, Draws draws) const override {
    const PhiloxPlace place = philox_place(stream, ordinal, draws);
    generator.set_current_seed(place.seed);
    generator.set_offset(place.offset);
  }
};

const Cuda the_cuda;

}  // namespace
}  // namespace smp::runtime

/// All that the library shows. Throws c10::Error where LibTorch finds no GPU, or the driver is too old for it.
extern "C" [[gnu::visibility("default")]] const smp::runtime::Device* smp_cuda_device() {
  c10::cuda::device_count_ensure_non_zero();
  at::globalContext().lazyInitDevice(c10::kCUDA);
  return &smp::runtime::the_cuda;
}
