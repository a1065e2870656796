// The library that a rank loads for CUDA, where there is no GPU: smp's seam to the device, and LibTorch's.
#include "runtime/device/device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <optional>

#include "runtime/device/random.h"
#include "tests/fake_gpu/operators.h"
#include "tests/fake_gpu/order.h"

namespace smp::fake_gpu {
namespace {

const c10::Device kThisGpu(c10::kCUDA, 0);

void refuse_in_recording(const char* what) {
  TORCH_CHECK(Recording::of_thread() == nullptr, "expected work that a recording holds, got ", what);
}

Recorded& recorded(const runtime::Event& event) { return *static_cast<Recorded*>(event.get()); }

class Lane final : public runtime::DeviceLane {
 public:
  void enter() override { rest_ = Gpu::exchange(own_); }
  void leave() noexcept override { Gpu::exchange(rest_); }
  void join() override { Gpu::the().go_on_behind(rest_, Gpu::the().record(own_)); }
  void share(const c10::Storage& memory) override { Gpu::the().share(memory.data_ptr(), rest_); }

 private:
  const Stream own_ = Gpu::the().stream_from_pool();
  Stream rest_ = own_;
};

class Graph final : public runtime::DeviceGraph {
 public:
  explicit Graph(const Graph* before) : pool_(before != nullptr ? before->pool_ : std::make_shared<Pool>()) {}

  void record(const std::function<void()>& work) override {
    const InPool in_pool(pool_);
    Recording recording;
    work();
    launches_ = std::move(recording.launches);
  }

  void seed(uint64_t ordinal) override {
    draws_ = true;
    const auto seed = [this, ordinal] {
      at::Generator generator = runtime::host().default_generator();
      generator.set_current_seed(runtime::operator_seed(random_stream_, ordinal));
    };
    Recording::of_thread()->launches.push_back({"a seed", {}, {}, seed});
  }

  void replay(uint64_t random_stream) override {
    std::optional<runtime::GeneratorHold> hold;
    at::Generator generator = runtime::host().default_generator();
    at::Tensor before;
    if (draws_) {  // of its own generator on a GPU
      hold.emplace();
      before = generator.get_state();
    }
    random_stream_ = random_stream;
    for (const Launch& launch : launches_) {
      Gpu::the().launch(launch.what, launch.reads, launch.writes);
      launch.run();
    }
    if (draws_) generator.set_state(before);
  }

 private:
  class InPool {
   public:
    explicit InPool(const std::shared_ptr<Pool>& pool) { Gpu::pool_of_thread() = pool; }
    ~InPool() { Gpu::pool_of_thread().reset(); }
    InPool(const InPool&) = delete;
    InPool& operator=(const InPool&) = delete;
  };

  std::shared_ptr<Pool> pool_;
  std::vector<Launch> launches_;
  bool draws_ = false;
  uint64_t random_stream_ = 0;
};

class FakeGpu final : public runtime::Device {
 public:
  FakeGpu() : Device(c10::kCUDA, c10::DispatchKey::CUDA, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCUDA) {}

  int count() const override { return 1; }
  void use(int /*index*/) const override {}
  c10::Device current() const override { return kThisGpu; }
  std::string model() const override { return "none"; }
  std::string identity() const override { return "none"; }

  c10::DataPtr allocate(int64_t num_bytes) const override { return Gpu::the().allocate(num_bytes); }
  at::Tensor empty(at::IntArrayRef sizes, c10::ScalarType dtype) const override {
    return at::empty(sizes, at::TensorOptions(kThisGpu).dtype(dtype));
  }
  void copy(void* to, const void* from, int64_t num_bytes) const override {
    start_copy(to, from, num_bytes);
    if (!Gpu::the().find(to) || !Gpu::the().find(from)) wait(record());
  }
  c10::DataPtr allocate_pinned(int64_t num_bytes) const override { return Gpu::the().allocate_pinned(num_bytes); }
  void start_copy(void* to, const void* from, int64_t num_bytes) const override {
    Gpu::the().start_copy(to, from, num_bytes);
  }
  void sum_in_order(const std::vector<const void*>& terms, void* sum, int64_t num_elements,
                    c10::ScalarType dtype) const override {
    if (num_elements == 0) return;
    const int64_t num_bytes = num_elements * static_cast<int64_t>(c10::elementSize(dtype));
    std::vector<Range> reads;
    for (const void* term : terms) reads.push_back(Gpu::the().ranges(term, num_bytes).at(0));
    Gpu::the().launch("a sum", reads, Gpu::the().ranges(sum, num_bytes));
    runtime::host().sum_in_order(terms, sum, num_elements, dtype);
  }
  int64_t free_bytes() const override { return Gpu::the().free_bytes(); }
  void release_free_memory() const override {}

  runtime::Event record() const override {
    refuse_in_recording("a record of an event");
    return std::make_shared<Recorded>(Gpu::the().record(Gpu::current()));
  }
  void wait(const runtime::Event& event) const override {
    refuse_in_recording("a wait for the device");
    if (event) Gpu::the().wait(recorded(event));
  }
  bool has_reached(const runtime::Event& event) const override { return !event || Gpu::the().has_reached(recorded(event)); }
  void go_on_behind(const runtime::Event& event) const override {
    refuse_in_recording("an event from outside");
    if (event) Gpu::the().go_on_behind(Gpu::current(), recorded(event));
  }
  std::unique_ptr<runtime::DeviceClock> new_clock() const override { return runtime::host().new_clock(); }

  std::unique_ptr<runtime::DeviceLane> new_lane() const override { return std::make_unique<Lane>(); }
  std::unique_ptr<runtime::DeviceGraph> new_graph(const runtime::DeviceGraph* before) const override {
    return std::make_unique<Graph>(static_cast<const Graph*>(before));
  }

  at::Generator default_generator() const override { return runtime::host().default_generator(); }
  at::Generator new_generator() const override { return runtime::host().new_generator(); }
  void seed(at::Generator& generator, uint64_t stream, uint64_t ordinal, runtime::Draws draws) const override {
    runtime::host().seed(generator, stream, ordinal, draws);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device /*device*/) const override { return kThisGpu; }
  c10::Device getDevice() const override { return kThisGpu; }
  void setDevice(c10::Device /*device*/) const override {}
  void uncheckedSetDevice(c10::Device /*device*/) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  static c10::Stream stream(Stream number) { return c10::Stream(c10::Stream::UNSAFE, kThisGpu, number); }
  c10::Stream getStream(c10::Device /*device*/) const override { return stream(Gpu::current()); }
  c10::Stream getDefaultStream(c10::Device /*device*/) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*is_high_priority*/) const override {
    return stream(Gpu::the().stream_from_pool());
  }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(Gpu::exchange(next.id())); }
  void synchronizeStream(const c10::Stream& stream) const override { Gpu::the().wait(Gpu::the().record(stream.id())); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*index*/, c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Recorded();
    *static_cast<Recorded*>(*event) = Gpu::the().record(stream.id());
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Gpu::the().go_on_behind(stream.id(), *static_cast<Recorded*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Gpu::the().has_reached(*static_cast<Recorded*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Gpu::the().wait(*static_cast<Recorded*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    const std::unique_ptr<Recorded> ended(static_cast<Recorded*>(event));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    Gpu::the().share(memory, stream.id());
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override { return Gpu::the().allocate_pinned(static_cast<int64_t>(num_bytes)); }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  bool isPinnedPtr(const void* data) const override { return Gpu::the().is_pinned(data); }
  at::Generator getNewGenerator(c10::DeviceIndex /*index*/) const override { return at::detail::createCPUGenerator(); }
};

[[maybe_unused]] const bool has_hooks = [] {
  at::CUDAHooksRegistry()->Register("CUDAHooks", [](at::CUDAHooksArgs /*args*/) { return std::make_unique<Hooks>(); });
  return true;
}();

// A program in which something is out of order has failed, whatever it says.
void tell_problems() {
  constexpr size_t kMost = 20;
  const std::vector<std::string> problems = Gpu::the().take_problems();
  if (problems.empty()) return;
  for (size_t i = 0; i < std::min(problems.size(), kMost); ++i) std::cerr << "fake GPU: " << problems[i] << '\n';
  std::cerr << "fake GPU: " << problems.size() << " in all" << std::endl;
  std::fflush(nullptr);
  _exit(1);
}

[[maybe_unused]] const int is_told = std::atexit(tell_problems);

}  // namespace
}  // namespace smp::fake_gpu

extern "C" [[gnu::visibility("default")]] const smp::runtime::Device* smp_cuda_device() {
  static const smp::fake_gpu::FakeGpu device;
  return &device;
}
