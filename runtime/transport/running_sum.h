// A sum over ranks that goes on while the caller computes. The same bits as Transport::all_reduce_sum.
#pragma once

#include <c10/core/ScalarType.h>

#include <functional>
#include <memory>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

class Device;

/// Replaces data by the sum over all ranks of the group, in rank order, by messages with the tags `tag` and `tag` + 1.
/// Nothing moves by itself: the caller asks now and then whether it is done.
///
/// Each rank sums one part of the data: it receives that part from all others, and sends them the sum (reduce-scatter, then
/// all-gather, both direct). That moves 2 (n - 1) / n times the data per rank, which is the least possible, in two hops.
///
///   RunningSum sum(replicas, kFirstBucketTag, memory_of(flat), holder, type);   // all ranks, in the same order
///   while (computing) sum.advance();
///   sum.wait("gradients");
///
/// One that is destroyed before it is done leaves its buffer to the messages under way.
class RunningSum {
 public:
  /// Called once with the elements of `data` that this rank has summed, before others get them: what is done to all elements
  /// alike, with the same bits on every rank.
  using PartDone = std::function<void(int64_t first, int64_t num_elements)>;

  /// Float, Double, Long, BFloat16 or Half terms, at most 1 GiB per rank of the group, in memory of the host or of this
  /// rank's device that `holder` keeps until the end, or the caller where it is null. Sums are made where the terms are.
  RunningSum(Transport& group, int tag, const DeviceMemory& terms, const std::shared_ptr<void>& holder, c10::ScalarType type,
             PartDone part_done = {});
  ~RunningSum();
  RunningSum(RunningSum&&) = default;
  RunningSum& operator=(RunningSum&&) = delete;

  /// Moves on what can be moved on and returns whether all is done. Never blocks. Throws CommError, also where another
  /// rank's part is longer or shorter than its own; two different sums may agree in some parts, and those ranks wait.
  bool advance();
  /// Throws CommError with `action` in its text after the time-out.
  void wait(std::string_view action);

 private:
  enum class Hop { kGather, kSpread, kDone };
  struct Part {
    int64_t first, num_elements;
    DeviceMemory memory;
  };
  struct Message {
    Request request;
    int64_t num_bytes;  // that it must have
  };
  void abandon_memory() const;
  static void check_length(Message& done, std::string_view action);
  Part part(int rank) const;
  DeviceMemory received_from(int rank) const;
  void receive(int from, int tag, const DeviceMemory& into);
  void send(int to, int tag, const DeviceMemory& memory);
  void start_gather();
  void start_spread();
  void finish_hop();

  Transport* group_;
  int tag_;
  std::shared_ptr<void> data_;
  int64_t num_elements_;
  const Device* device_;
  c10::ScalarType type_;
  PartDone part_done_;
  std::shared_ptr<void> received_;  // of my part, by rank; from LibTorch's allocator, as `data`
  std::vector<Message> messages_;
  Hop hop_ = Hop::kGather;
};

}  // namespace smp::runtime
