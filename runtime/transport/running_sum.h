// A sum over ranks that goes on while the caller computes. The same bits as Transport::all_reduce_sum.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Replaces data by the sum over all ranks of the group, in rank order, in two hops as all_reduce_in_rank_order, of messages
/// with the tags `tag` and `tag` + 1. Nothing moves by itself: the caller asks now and then whether it is done.
///
///   RunningSum sum(replicas, kBucketTag, memory_of(flat), holder, type);   // all ranks, sums of one tag in the same order
///   while (computing) sum.advance(); sum.wait("gradients");
///
/// One that is destroyed before it is done leaves its buffer to the messages under way.
class RunningSum {
 public:
  /// Called once with the elements of `data` that this rank has summed, before the others get them:
  /// what is done to all elements alike is done by one rank each.
  using PartDone = std::function<void(int64_t first, int64_t num_elements)>;

  /// Float, Double, BFloat16 or Half terms, at most 1 GiB per rank of the group, in memory of the host that `holder` keeps
  /// until the end.
  RunningSum(Transport& group, int tag, const DeviceMemory& terms, const std::shared_ptr<void>& holder, c10::ScalarType type,
             PartDone part_done = {});
  ~RunningSum();
  RunningSum(RunningSum&&) = default;
  RunningSum& operator=(RunningSum&&) = delete;

  /// Moves on what can be moved on and returns whether all is done. Never blocks. Throws CommError.
  bool advance();
  /// Throws CommError with `action` in its text after the time-out.
  void wait(std::string_view action);

 private:
  enum class Hop { kGather, kSpread, kDone };
  struct Part {
    char* data;
    int64_t num_elements;
    int64_t num_bytes;
  };
  Part part(int rank) const;
  char* received_from(int rank) const;
  void start_gather();
  void start_spread();
  void finish_hop();

  Transport* group_;
  int tag_;
  std::shared_ptr<void> data_;
  int64_t num_elements_;
  c10::ScalarType type_;
  PartDone part_done_;
  std::shared_ptr<void> received_;  // of my part, by rank; from LibTorch's allocator, as `data`
  std::vector<Request> requests_;
  Hop hop_ = Hop::kGather;
};

}  // namespace smp::runtime
