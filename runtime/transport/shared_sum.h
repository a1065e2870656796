// A sum over the ranks of one host that goes on while the caller computes. The same bits as Transport::all_reduce_sum.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "runtime/transport/shared_memory.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Sums in memory that the ranks share, one after another. Nobody sends numbers: each rank writes its terms to its own
/// block, sums one part of all blocks in the order of the ranks, and reads the others' parts where they are. Empty messages
/// of one tag tell how far a rank is: its terms are there, its part is summed, it has read the sum.
///
///   SharedSum sum(replicas, kFirstBucketTag, std::move(memory));
///   if (sum.is_free()) { ... write to sum.own() ...; sum.start(count, at::kFloat); }
///   while (computing) sum.advance();
///   sum.wait("gradients"); sum.read(0, count * 4, mine); sum.release();
class SharedSum {
 public:
  /// As RunningSum::PartDone.
  using PartDone = std::function<void(int64_t first, int64_t num_elements)>;

  SharedSum(Transport& group, int tag, std::unique_ptr<SharedMemory> memory)
      : group_(group), tag_(tag), memory_(std::move(memory)) {}

  /// Where this rank's terms go, as soon as it is free.
  char* own() const { return memory_->of(group_.rank()); }
  int64_t num_bytes() const { return memory_->num_bytes(); }
  /// Has everybody read the last sum? Never blocks. Throws CommError.
  bool is_free();
  /// Throws CommError with `action` in its text after the time-out. Before the transport ends: messages are under way until
  /// it is free.
  void wait_until_free(std::string_view action);

  /// Float, Double, BFloat16 or Half terms, from the first byte of own() on.
  void start(int64_t num_elements, c10::ScalarType type, PartDone part_done = {});
  /// Moves on what can be moved on and returns whether the sum is there. Never blocks. Throws CommError.
  bool advance();
  void wait(std::string_view action);

  /// Copies as many bytes of the sum as there is memory of the host, until it is released.
  void read(int64_t first_byte, const DeviceMemory& to) const;
  void release();

 private:
  enum class Hop { kFree, kTerms, kParts, kSummed, kReads };
  int64_t first_of(int rank) const { return num_elements_ * rank / group_.size(); }
  void tell(Hop next);
  bool all_told();
  void wait_for_all(std::string_view action);
  void finish_hop();

  Transport& group_;
  int tag_;
  std::unique_ptr<SharedMemory> memory_;
  int64_t num_elements_ = 0;
  c10::ScalarType type_ = c10::ScalarType::Float;
  PartDone part_done_;
  std::vector<Request> requests_;
  Hop hop_ = Hop::kFree;
};

}  // namespace smp::runtime
