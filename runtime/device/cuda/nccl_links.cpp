// A communicator of two ranks, and a stream, for each link: NCCL knows no tags, and what a stream waits for holds up what
// comes behind it. Communicators do not block: they are set up with what the other rank does, which may wait for this one.
#include "runtime/device/cuda/nccl_links.h"

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <nccl.h>

#include <cstring>
#include <deque>
#include <string>

namespace smp::runtime {
namespace {

void check(ncclResult_t result, ncclComm_t of) {
  TORCH_CHECK(result == ncclSuccess || result == ncclInProgress, "NCCL: ", ncclGetErrorString(result), ": ",
              ncclGetLastError(of));
}

class NcclLink final : public DeviceLink {
 public:
  NcclLink(const ncclUniqueId& id, bool sends) : sends_(sends) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    check(ncclCommInitRankConfig(&communicator_, 2, id, sends ? 0 : 1, &config), nullptr);
  }
  ~NcclLink() override {
    if (communicator_ != nullptr) (void)ncclCommAbort(communicator_);
    (void)cudaStreamDestroy(stream_);
  }

  void start(const DeviceMemory& memory, const Event& ready) override {
    started_.push_back({memory, ready});
    issue();
  }

  std::optional<Event> next_given() override {
    issue();
    if (given_.empty()) return std::nullopt;
    Event end = std::move(given_.front());
    given_.pop_front();
    return end;
  }

 private:
  struct Transfer {
    DeviceMemory memory;
    Event ready;
  };

  // Not of LibTorch's pool, whose streams have several users.
  static c10::cuda::CUDAStream new_stream() {
    int least = 0, greatest = 0;
    cudaStream_t made = nullptr;
    C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest));
    return c10::cuda::getStreamFromExternal(made, c10::cuda::current_device());
  }

  // While NCCL has not ended what it was called for, it may not be called again.
  bool is_ready() {
    ncclResult_t state = ncclSuccess;
    check(ncclCommGetAsyncError(communicator_, &state), communicator_);
    check(state, communicator_);
    return state == ncclSuccess;
  }

  void issue() {
    while ((is_issuing_ || !started_.empty()) && is_ready()) {
      if (is_issuing_) {
        auto end = std::make_shared<at::cuda::CUDAEvent>();
        end->record(stream_);
        given_.push_back(std::move(end));
        is_issuing_ = false;
        continue;
      }
      const auto [memory, ready] = started_.front();
      started_.pop_front();
      if (ready) static_cast<at::cuda::CUDAEvent*>(ready.get())->block(stream_);
      const auto num_bytes = static_cast<size_t>(memory.num_bytes);
      check(sends_ ? ncclSend(memory.data, num_bytes, ncclChar, 1, communicator_, stream_)
                   : ncclRecv(memory.data, num_bytes, ncclChar, 0, communicator_, stream_),
            communicator_);
      is_issuing_ = true;
    }
  }

  const bool sends_;
  ncclComm_t communicator_ = nullptr;
  const c10::cuda::CUDAStream stream_ = new_stream();
  std::deque<Transfer> started_;
  bool is_issuing_ = false;  // the last one
  std::deque<Event> given_;
};

class NcclLinks final : public DeviceLinks {
 public:
  std::string new_name() const override {
    ncclUniqueId id;
    check(ncclGetUniqueId(&id), nullptr);
    return {id.internal, sizeof id.internal};
  }
  std::unique_ptr<DeviceLink> connect(std::string_view name, End end) const override {
    ncclUniqueId id;
    TORCH_CHECK(name.size() == sizeof id.internal, "NCCL: expected an identifier of ", sizeof id.internal, " bytes, got ",
                name.size());
    std::memcpy(id.internal, name.data(), name.size());
    return std::make_unique<NcclLink>(id, end == End::kSender);
  }
};

}  // namespace

const DeviceLinks* nccl_links() {
  static const NcclLinks links;
  return &links;
}

}  // namespace smp::runtime
