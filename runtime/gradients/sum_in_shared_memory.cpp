// Reduce-scatter in place, then everybody reads: nobody sends gradients.
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <utility>
#include <vector>

#include "runtime/gradients/bucket_sum.h"
#include "runtime/libtorch/memory_tensor.h"
#include "runtime/transport/shared_memory.h"

namespace smp::runtime {
namespace {

/// Each replica packs buckets into its own block, sums one part of all blocks in the order of the replicas, and reads the
/// others' parts where they are. Empty messages of one tag tell how far it is: its gradients are there, its part is summed,
/// it has read the sums.
class SumInSharedMemory : public BucketSum {
 public:
  SumInSharedMemory(Transport& replicas, int tag, std::unique_ptr<SharedMemory> memory)
      : replicas_(replicas), tag_(tag), memory_(std::move(memory)) {}

  int64_t shared_bytes() const override { return memory_->num_bytes(); }
  bool is_free() override { return advance() && hop_ == Hop::kFree; }

  void start(const BucketMemory& bucket, int divisor) override {
    TORCH_INTERNAL_ASSERT(hop_ == Hop::kFree, "a bucket starts before everybody has read the last one");
    flat_ = tensor_on(host(), memory_->of(replicas_.rank()), {bucket.num_elements()}, {1}, bucket.dtype(),
                      /*holder=*/nullptr);
    divide_ = bucket.divider(flat_, divisor);
    bucket.pack(flat_);
    tell(Hop::kTerms);
  }

  bool advance() override {
    for (; is_under_way(); finish_hop()) {
      while (!requests_.empty() && requests_.back().test()) requests_.pop_back();
      if (!requests_.empty()) return false;
    }
    return true;
  }

  void wait() override {
    for (; is_under_way(); finish_hop()) {
      for (Request& request : requests_) request.wait("gradients");
      requests_.clear();
    }
  }

  void finish(BucketMemory& bucket, Backward backward) override {
    const auto read = [this](int64_t first, const at::Tensor& to) { copy_from_parts(first, memory_of(to)); };
    const at::Tensor flags = bucket.new_flat(bucket.num_flags());
    read(bucket.num_gradients(), flags);
    bucket.unpack(read, flags, backward);
    tell(Hop::kReads);
  }

 private:
  enum class Hop : uint8_t { kFree, kTerms, kParts, kSummed, kReads };
  bool is_under_way() const { return hop_ != Hop::kFree && hop_ != Hop::kSummed; }
  int64_t first_of(int rank) const { return flat_.numel() * rank / replicas_.size(); }
  char* element(int rank, int64_t index) const { return memory_->of(rank) + index * flat_.element_size(); }

  // What this rank has written is there before the others hear of it, and what they have written when it has heard.
  void tell(Hop next) {
    std::atomic_thread_fence(std::memory_order_release);
    for (int step = 1; step < replicas_.size(); ++step) {
      const int other = (replicas_.rank() + step) % replicas_.size();
      requests_.push_back(replicas_.irecv(other, tag_, nullptr, 0));
      requests_.push_back(replicas_.isend(other, tag_, nullptr, 0));
    }
    hop_ = next;
  }

  void finish_hop() {
    std::atomic_thread_fence(std::memory_order_acquire);
    if (hop_ != Hop::kTerms) {
      hop_ = hop_ == Hop::kParts ? Hop::kSummed : Hop::kFree;
      return;
    }
    const int me = replicas_.rank();
    const int64_t first = first_of(me), count = first_of(me + 1) - first;
    std::vector<const void*> terms;
    for (int rank = 0; rank < replicas_.size(); ++rank) terms.push_back(element(rank, first));
    host().sum_in_order(terms, element(me, first), count, flat_.scalar_type());
    divide_(first, count);
    tell(Hop::kParts);
  }

  void copy_from_parts(int64_t first, const DeviceMemory& to) const {
    const int64_t last = first + to.num_bytes / flat_.element_size();
    for (int rank = 0; rank < replicas_.size(); ++rank) {
      const int64_t begin = std::max(first, first_of(rank)), end = std::min(last, first_of(rank + 1));
      auto* const into = static_cast<char*>(to.data) + (begin - first) * flat_.element_size();
      if (begin < end) host().copy(into, element(rank, begin), (end - begin) * flat_.element_size());
    }
  }

  Transport& replicas_;
  int tag_;
  std::unique_ptr<SharedMemory> memory_;
  at::Tensor flat_;  // in this rank's block
  std::function<void(int64_t first, int64_t num_elements)> divide_;
  std::vector<Request> requests_;
  Hop hop_ = Hop::kFree;
};

}  // namespace

std::unique_ptr<BucketSum> sum_in_shared_memory(Transport& replicas, int tag, int64_t most_bytes) {
  auto memory = SharedMemory::make(replicas, most_bytes);
  return memory ? std::make_unique<SumInSharedMemory>(replicas, tag, std::move(memory)) : nullptr;
}

}  // namespace smp::runtime
