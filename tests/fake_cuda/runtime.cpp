// NVIDIA's runtime, where a program that exports these finds them before libcudart's: LibTorch's allocators, streams, events
// and graphs run on it, its kernels compute nothing. What is not here is libcudart's, which finds no driver and says so.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_cuda/streams.h"

namespace smp::fake_cuda {
namespace {

constexpr size_t kMemoryBytes = size_t{8} << 30;
constexpr int kGarbage = 0xff, kAskedInVain = 3;  // times that an event is not reached, if nobody waits

struct Event {
  PointPtr point{};
  int num_asked = 0;
};

struct Graph {
  std::vector<Work> works{};
};

struct Memory {
  size_t num_bytes = 0;
  bool is_pinned = false;
};

// Never destroyed: tensors may end after it would be.
struct State {
  Stream default_stream{};
  std::map<const char*, Memory> memories{};
  std::set<Stream*> streams{};
  size_t used_bytes = 0;
};
State& state() {
  static State& the = *new State();
  return the;
}

thread_local cudaError_t last_error = cudaSuccess;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
thread_local Stream* capturing_of_thread = nullptr;

cudaError_t fail(cudaError_t error) { return last_error = error; }

Stream& of(cudaStream_t stream) { return stream == nullptr ? state().default_stream : *reinterpret_cast<Stream*>(stream); }
Event& of(cudaEvent_t event) { return *reinterpret_cast<Event*>(event); }

const Memory* memory_at(const void* data) {
  const auto& memories = state().memories;
  auto after = memories.upper_bound(static_cast<const char*>(data));
  if (after == memories.begin()) return nullptr;
  const auto& [begin, memory] = *std::prev(after);
  return static_cast<const char*>(data) < begin + memory.num_bytes ? &memory : nullptr;
}

bool is_pageable(const void* data) { return memory_at(data) == nullptr; }

bool is_idle(const Stream& stream) { return stream.works.empty(); }

// No graph holds it, and a capture that is given it ends in an error.
bool breaks_capture(Stream& stream) {
  if (!stream.capture) return false;
  stream.capture->is_broken = true;
  return true;
}

// What may touch any stream is refused to a thread that captures, unless it says that it knows.
bool is_unsafe_now() {
  if (capturing_of_thread == nullptr || capture_mode == cudaStreamCaptureModeRelaxed) return false;
  return breaks_capture(*capturing_of_thread);
}

void run_all(Lock& held) {
  std::set<Stream*> streams = state().streams;
  streams.insert(&state().default_stream);
  for (Stream* const stream : streams) run(held, *stream, [&] { return is_idle(*stream); });
}

cudaError_t allocate(void** data, size_t num_bytes, bool is_pinned) {
  Lock held = lock();
  if (is_unsafe_now()) return fail(cudaErrorStreamCaptureUnsupported);
  if (!is_pinned && state().used_bytes + num_bytes > kMemoryBytes) return fail(cudaErrorMemoryAllocation);
  constexpr size_t kAlignment = 512;
  *data = std::aligned_alloc(kAlignment, (num_bytes + kAlignment - 1) / kAlignment * kAlignment);
  if (*data == nullptr) return fail(cudaErrorMemoryAllocation);
  std::memset(*data, kGarbage, num_bytes);
  state().memories[static_cast<char*>(*data)] = {num_bytes, is_pinned};
  if (!is_pinned) state().used_bytes += num_bytes;
  return cudaSuccess;
}

cudaError_t free_behind_all(void* data) {
  if (data == nullptr) return cudaSuccess;
  Lock held = lock();
  if (is_unsafe_now()) return fail(cudaErrorStreamCaptureUnsupported);
  run_all(held);
  const auto found = state().memories.find(static_cast<char*>(data));
  if (found == state().memories.end()) return fail(cudaErrorInvalidValue);
  if (!found->second.is_pinned) state().used_bytes -= found->second.num_bytes;
  state().memories.erase(found);
  std::free(data);
  return cudaSuccess;
}

// Of memory that is not pinned, CUDA reads before it returns, and it is written then, too.
cudaError_t copy(void* to, const void* from, size_t num_bytes, cudaStream_t on) {
  Lock held = lock();
  Stream& stream = of(on);
  const bool reads_now = is_pageable(from), writes_now = is_pageable(to);
  if ((reads_now || writes_now) && breaks_capture(stream)) return fail(cudaErrorStreamCaptureUnsupported);
  const std::string bytes = reads_now ? std::string(static_cast<const char*>(from), num_bytes) : std::string();
  give(stream, [=] {
    std::memmove(to, reads_now ? bytes.data() : from, num_bytes);
    return true;
  });
  if (writes_now) run(held, stream, [&] { return is_idle(stream); });
  return cudaSuccess;
}

cudaError_t set(void* data, int value, size_t num_bytes, cudaStream_t on) {
  const Lock held = lock();
  give(of(on), [=] {
    std::memset(data, value, num_bytes);
    return true;
  });
  return cudaSuccess;
}

cudaError_t launch(cudaStream_t on) {
  const Lock held = lock();
  give(of(on), [] { return true; });
  return cudaSuccess;
}

}  // namespace

size_t num_undone() {
  const Lock held = lock();
  size_t undone = state().default_stream.works.size();
  for (const Stream* const stream : state().streams) undone += stream->works.size();
  return undone;
}

}  // namespace smp::fake_cuda

using namespace smp::fake_cuda;

extern "C" {

// LibTorch's allocators end with the process, and leave what they know of each block.
const char* __lsan_default_suppressions() { return "leak:CachingAllocator\nleak:CachingHostAllocator\n"; }

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice); }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int /*device*/) {
  *properties = {};
  std::strcpy(properties->name, "none");
  properties->major = 9;
  properties->totalGlobalMem = kMemoryBytes;
  properties->multiProcessorCount = 1;
  properties->warpSize = 32;
  properties->maxThreadsPerMultiProcessor = 256;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = 48 << 10;
  for (int i = 0; i < 3; ++i) properties->maxGridSize[i] = properties->maxThreadsDim[i] = 1024;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr /*attribute*/, int /*device*/) {
  return *value = 0, cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const Lock held = lock();
  return *total = kMemoryBytes, *free = kMemoryBytes - state().used_bytes, cudaSuccess;
}
cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }

cudaError_t cudaMalloc(void** data, size_t num_bytes) { return allocate(data, num_bytes, false); }
cudaError_t cudaHostAlloc(void** data, size_t num_bytes, unsigned /*flags*/) { return allocate(data, num_bytes, true); }
cudaError_t cudaFree(void* data) { return free_behind_all(data); }
cudaError_t cudaFreeHost(void* data) { return free_behind_all(data); }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* data) {
  const Lock held = lock();
  const Memory* const memory = memory_at(data);
  *attributes = {};
  attributes->type = memory == nullptr   ? cudaMemoryTypeUnregistered
                     : memory->is_pinned ? cudaMemoryTypeHost
                                         : cudaMemoryTypeDevice;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind /*kind*/, cudaStream_t stream) {
  return copy(to, from, num_bytes, stream);
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t num_bytes, cudaStream_t stream) {
  return set(data, value, num_bytes, stream);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int /*priority*/) {
  const Lock held = lock();
  auto* const made = new Stream();
  state().streams.insert(made);
  return *stream = reinterpret_cast<cudaStream_t>(made), cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
// What it was given is done all the same; points may refer to it.
cudaError_t cudaStreamDestroy(cudaStream_t /*stream*/) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t on) {
  Lock held = lock();
  Stream& stream = of(on);
  if (breaks_capture(stream) || is_unsafe_now()) return fail(cudaErrorStreamCaptureUnsupported);
  run(held, stream, [&] { return is_idle(stream); });
  return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t on) {
  const Lock held = lock();
  Stream& stream = of(on);
  return advance(stream, [&] { return is_idle(stream); }) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaDeviceSynchronize() {
  Lock held = lock();
  if (is_unsafe_now()) return fail(cudaErrorStreamCaptureUnsupported);
  run_all(held);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  return *event = reinterpret_cast<cudaEvent_t>(new Event()), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &of(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t on) {
  const Lock held = lock();
  if (breaks_capture(of(on))) return fail(cudaErrorStreamCaptureUnsupported);  // smp records none in a graph
  of(event) = {.point = record(of(on))};
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t on, unsigned /*flags*/) {
  return cudaEventRecord(event, on);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t on, cudaEvent_t event, unsigned /*flags*/) {
  const Lock held = lock();
  if (breaks_capture(of(on))) return fail(cudaErrorStreamCaptureIsolation);
  wait(of(on), of(event).point);
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const Lock held = lock();
  if (is_unsafe_now()) return fail(cudaErrorStreamCaptureUnsupported);
  const PointPtr& point = of(event).point;
  if (!point || point->is_reached) return cudaSuccess;
  if (++of(event).num_asked <= kAskedInVain) return cudaErrorNotReady;
  return advance(*point->stream, [&] { return point->is_reached; }) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock held = lock();
  if (is_unsafe_now()) return fail(cudaErrorStreamCaptureUnsupported);
  const PointPtr point = of(event).point;
  if (point) run(held, *point->stream, [&] { return point->is_reached; });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t /*begin*/, cudaEvent_t /*end*/) { return *ms = 1, cudaSuccess; }

cudaError_t cudaStreamBeginCapture(cudaStream_t on, cudaStreamCaptureMode mode) {
  const Lock held = lock();
  of(on).capture = std::make_shared<Capture>();
  capture_mode = mode;
  capturing_of_thread = &of(on);
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t on, cudaGraph_t* graph) {
  const Lock held = lock();
  const std::shared_ptr<Capture> capture = std::exchange(of(on).capture, nullptr);
  capturing_of_thread = nullptr;
  capture_mode = cudaStreamCaptureModeGlobal;
  *graph = nullptr;
  if (!capture) return fail(cudaErrorIllegalState);
  if (capture->is_broken) return fail(cudaErrorStreamCaptureInvalidated);
  *graph = reinterpret_cast<cudaGraph_t>(new Graph{std::move(capture->works)});
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t on, cudaStreamCaptureStatus* status) {
  return cudaStreamGetCaptureInfo(on, status, nullptr, nullptr, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t on, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* /*graph*/, const cudaGraphNode_t** /*before*/,
                                     const cudaGraphEdgeData** /*edges*/, size_t* /*num_before*/) {
  const Lock held = lock();
  const std::shared_ptr<Capture>& capture = of(on).capture;
  *status = !capture             ? cudaStreamCaptureStatusNone
            : capture->is_broken ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
  if (id != nullptr) *id = reinterpret_cast<uintptr_t>(capture.get());
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return std::swap(*mode, capture_mode), cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long /*flags*/) {
  return *made = reinterpret_cast<cudaGraphExec_t>(new Graph(*reinterpret_cast<Graph*>(graph))), cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* /*nodes*/, size_t* num_nodes) {
  return *num_nodes = reinterpret_cast<Graph*>(graph)->works.size(), cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t on) {
  const Lock held = lock();
  for (const Work& work : reinterpret_cast<Graph*>(graph)->works) give(of(on), work);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete reinterpret_cast<Graph*>(graph);
  return cudaSuccess;
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* /*kernel*/, void** /*arguments*/) {
  return launch(config->stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t /*kernel*/, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                               size_t /*shared*/, cudaStream_t stream) {
  return launch(stream);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
}
