// NCCL between threads, by the rules of its documentation for communicators that do not block: what is called returns at
// once, and until ncclCommGetAsyncError says that it has been done, nothing else may be called. A stream is given a transfer
// when that has been done, and not before; the first one takes both ends.
#include <nccl.h>

#include <array>
#include <cstring>
#include <map>
#include <utility>

#include "tests/fake_cuda/fake_cuda.h"
#include "tests/fake_cuda/streams.h"

namespace smp::fake_cuda {
namespace {

constexpr int kPollsInVain = 2;

struct Transfer {
  void* data = nullptr;
  size_t num_bytes = 0;
  Stream* stream = nullptr;
  bool is_given = false;  // to the stream
};
struct Both {
  std::array<Transfer, 2> ends{};  // the sender's, the receiver's
  std::array<bool, 2> has_come{};
  bool is_done = false;
};

struct Pair {
  std::array<ncclComm_t, 2> ends{};
  std::array<size_t, 2> num_called{};
  std::map<size_t, std::shared_ptr<Both>> transfers{};
  bool is_broken = false;
};

std::map<std::string, std::shared_ptr<Pair>> pairs;
int num_names = 0, num_until_failure = -1, num_open = 0;

}  // namespace

void fail_after(int num_transfers) {
  const Lock held = lock();
  num_until_failure = num_transfers;
}

int num_communicators() {
  const Lock held = lock();
  return num_open;
}

}  // namespace smp::fake_cuda

using namespace smp::fake_cuda;

struct ncclComm {
  std::shared_ptr<Pair> pair;
  size_t end = 0;
  bool is_busy = true;  // with what it was called for
  int num_asked = 0;
  std::shared_ptr<Both> issuing{};
};

namespace {

bool run_transfer(const std::shared_ptr<Pair>& pair, const std::shared_ptr<Both>& both, size_t end) {
  if (both->is_done || pair->is_broken) return true;
  both->has_come[end] = true;
  const size_t other = 1 - end;
  if (!both->has_come[other]) {
    if (both->ends[other].is_given) advance(*both->ends[other].stream, [&] { return both->is_done; });
    return both->is_done;
  }
  if (both->ends[0].num_bytes != both->ends[1].num_bytes) problem("ends of a transfer of different length");
  std::memcpy(both->ends[1].data, both->ends[0].data, both->ends[1].num_bytes);
  return both->is_done = true;
}

// What NCCL does by and by on a thread of its own.
void go_on(ncclComm& communicator) {
  Pair& pair = *communicator.pair;
  const bool is_alone = pair.ends[1 - communicator.end] == nullptr;
  if (!communicator.is_busy || is_alone || ++communicator.num_asked <= kPollsInVain) return;
  if (communicator.issuing) {
    if (pair.num_called[1 - communicator.end] == 0) return;  // connects them
    const std::shared_ptr<Both> both = std::exchange(communicator.issuing, nullptr);
    Transfer& transfer = both->ends[communicator.end];
    transfer.is_given = true;
    give(*transfer.stream,
         [pair = communicator.pair, both, end = communicator.end] { return run_transfer(pair, both, end); });
  }
  communicator.is_busy = false;
}

ncclResult_t call(ncclComm& communicator, const Transfer& transfer, int peer, size_t end) {
  const Lock held = lock();
  if (communicator.is_busy) {
    problem("a transfer for a communicator that has not done what it was called for");
    return ncclInvalidUsage;
  }
  if (communicator.end != end || peer != static_cast<int>(1 - end)) problem("a transfer from or to the wrong end");
  Pair& pair = *communicator.pair;
  if (num_until_failure >= 0 && num_until_failure-- == 0) pair.is_broken = true;
  auto& both = pair.transfers[pair.num_called[end]++];
  if (!both) both = std::make_shared<Both>();
  both->ends[end] = transfer;
  communicator.is_busy = true;
  communicator.num_asked = 0;
  communicator.issuing = both;
  return ncclInProgress;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock held = lock();
  *id = {};
  std::strcpy(id->internal, std::to_string(++num_names).c_str());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int num_ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  const Lock held = lock();
  auto& pair = pairs[id.internal];
  if (!pair) pair = std::make_shared<Pair>();
  if (num_ranks != 2 || config->blocking != 0 || pair->ends.at(static_cast<size_t>(rank)) != nullptr) {
    problem("a communicator that is not one of two that do not block");
    return ncclInvalidArgument;
  }
  *made = new ncclComm{.pair = pair, .end = static_cast<size_t>(rank)};
  pair->ends[static_cast<size_t>(rank)] = *made;
  ++num_open;
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  const Lock held = lock();
  go_on(*communicator);
  *state = communicator->pair->is_broken ? ncclRemoteError : communicator->is_busy ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  if (type != ncclChar) return ncclInvalidArgument;
  return call(*communicator, {const_cast<void*>(data), count, reinterpret_cast<Stream*>(stream)}, peer, 0);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t communicator,
                      cudaStream_t stream) {
  if (type != ncclChar) return ncclInvalidArgument;
  return call(*communicator, {data, count, reinterpret_cast<Stream*>(stream)}, peer, 1);
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  const Lock held = lock();
  communicator->pair->is_broken = true;
  --num_open;
  delete communicator;
  tell_all();
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited" : "invalid";
}
const char* ncclGetLastError(ncclComm_t /*communicator*/) { return "as a test wants it"; }
}
