// One at::cuda::CUDAGraph with a generator of its own: replays of several graphs, on several streams, must not write to one
// seed.
#include "runtime/device/cuda/cuda_graph.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <optional>

namespace smp::runtime {
namespace {

// Streams to record on, of nobody else: what another thread gives a stream of LibTorch's pool, which hands out each to
// several, would be recorded with the rest. Each is one thread's while that lives, so that the graphs of a rank use memory
// again, which the allocator does for one stream alone, and one workspace of cuBLAS.
class RecordingStreams {
 public:
  static c10::cuda::CUDAStream of_thread() {
    static thread_local Borrowed borrowed;
    const c10::DeviceIndex device = c10::cuda::current_device();
    const auto found = borrowed.streams.find(device);
    return found != borrowed.streams.end() ? found->second : borrowed.streams.emplace(device, take(device))->second;
  }

 private:
  using ByDevice = std::multimap<c10::DeviceIndex, c10::cuda::CUDAStream>;
  struct Free {
    std::mutex mutex;
    ByDevice streams;
  };
  struct Borrowed {
    ~Borrowed() {
      const std::lock_guard lock(free().mutex);
      free().streams.merge(streams);
    }
    ByDevice streams;
  };

  // Never destroyed: threads may end after it would be.
  static Free& free() {
    static Free& the = *new Free();
    return the;
  }
  static c10::cuda::CUDAStream take(c10::DeviceIndex device) {
    const std::lock_guard lock(free().mutex);
    if (const auto node = free().streams.extract(device)) return node.mapped();
    cudaStream_t made = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return c10::cuda::getStreamFromExternal(made, device);
  }
};

// The rest goes on behind what `beside` has been given, also where no graph was made of it: LibTorch begins a recording by
// writing to what its replays write to.
class BehindAtEnd {
 public:
  BehindAtEnd(c10::cuda::CUDAStream rest, c10::cuda::CUDAStream beside) : rest_(rest), beside_(beside) {}
  ~BehindAtEnd() {
    try {
      at::cuda::CUDAEvent given;
      given.record(beside_);
      given.block(rest_);
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): a device that has failed; whoever uses it next hears why
    }
  }
  BehindAtEnd(const BehindAtEnd&) = delete;
  BehindAtEnd& operator=(const BehindAtEnd&) = delete;

 private:
  const c10::cuda::CUDAStream rest_, beside_;
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(const CudaGraph* before) : pool_(before != nullptr ? before->pool_ : at::cuda::graph_pool_handle()) {}

  void record(const std::function<void()>& work) override {
    const c10::cuda::CUDAStream own = c10::cuda::getCurrentCUDAStream();
    const c10::cuda::CUDAStream beside = RecordingStreams::of_thread();
    const c10::cuda::CUDAStreamGuard on_it(beside);
    at::cuda::CUDAEvent reached;
    reached.record(own);
    reached.block(beside);  // what the allocator has freed for it
    const BehindAtEnd behind(own, beside);
    const WithGenerator drawing(generator_);
    try {
      // Other threads go on as they were: ranks may be threads of one process.
      graph_.capture_begin(pool_, cudaStreamCaptureModeThreadLocal);
      work();
      graph_.capture_end();
    } catch (...) {
      give_up();
      throw;
    }
  }

  void seed(uint64_t ordinal) override {
    if (!first_ordinal_) first_ordinal_ = ordinal;
    const uint64_t offset = philox_offset(ordinal - *first_ordinal_);
    auto& drawing =
        *at::get_generator_or_default<at::CUDAGeneratorImpl>(std::nullopt, at::cuda::detail::getDefaultCUDAGenerator());
    // The one way to ask where it is: it hands out the offset of what is drawn next.
    const uint64_t now = drawing.philox_cuda_state(0).offset_intragraph_;
    TORCH_CHECK(now <= offset, "expected an operator that draws less than ", philox_offset(1),
                " numbers in each of its threads, got one before random operator ", ordinal, " that has drawn more");
    drawing.philox_cuda_state(offset - now);
  }

  void replay(uint64_t random_stream) override {
    if (first_ordinal_) {
      generator_.set_current_seed(random_stream);
      generator_.set_offset(philox_offset(*first_ordinal_));
    }
    graph_.replay();
  }

 private:
  /// The default generator draws from the state of another one while it lives.
  class WithGenerator {
   public:
    explicit WithGenerator(const at::Generator& other) : before_(default_generator().graphsafe_get_state()) {
      default_generator().graphsafe_set_state(other);
    }
    ~WithGenerator() { default_generator().graphsafe_set_state(before_); }
    WithGenerator(const WithGenerator&) = delete;
    WithGenerator& operator=(const WithGenerator&) = delete;

   private:
    static at::Generator default_generator() { return at::cuda::detail::getDefaultCUDAGenerator(); }
    at::Generator before_;
  };

  // LibTorch ends what the allocator does for a capture only behind one that has succeeded.
  void give_up() noexcept {
    cudaGraph_t broken = nullptr;
    const auto stream = c10::cuda::getCurrentCUDAStream();
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status != cudaStreamCaptureStatusNone) {
      (void)cudaStreamEndCapture(stream, &broken);
    }
    if (broken != nullptr) (void)cudaGraphDestroy(broken);
    (void)cudaGetLastError();  // the refusal of what a capture cannot hold would be found by the next operator
    const c10::DeviceIndex device = c10::cuda::current_device();
    at::HostAllocator& host = *at::getHostAllocator(at::kCUDA);
    end([&] {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool_);
      c10::cuda::CUDACachingAllocator::releasePool(device, pool_);
    });
    end([&] {
      host.end_allocate_to_pool(pool_);
      host.release_pool(pool_);
    });
  }

  template <class Call>
  static void end(const Call& call) noexcept {
    try {
      call();
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): it had ended before, and the graph gives it back
    }
  }

  at::cuda::MempoolId_t pool_;
  at::Generator generator_ = at::cuda::detail::createCUDAGenerator();
  std::optional<uint64_t> first_ordinal_;
  at::cuda::CUDAGraph graph_;
};

}  // namespace

std::unique_ptr<DeviceGraph> make_cuda_graph(const DeviceGraph* before) {
  return std::make_unique<CudaGraph>(static_cast<const CudaGraph*>(before));
}

}  // namespace smp::runtime
