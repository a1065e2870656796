// The ways in which replicas sum a bucket: one interface, a file for each.
#pragma once

#include <functional>
#include <memory>

#include "runtime/gradients/bucket_memory.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Sums one bucket after another, on all replicas in the same order. Everything throws CommError.
///
///   if (sum->is_free()) sum->start(bucket, divisor);
///   while (computing) sum->advance();
///   sum->wait(), sum->finish(bucket, Backward::kIsOver), sum->wait();
class BucketSum {
 public:
  virtual ~BucketSum() = default;
  /// May the next bucket start? Never blocks.
  virtual bool is_free() { return true; }
  /// Packs the bucket. divisor: of the sums.
  virtual void start(const BucketMemory& bucket, int divisor) = 0;
  /// Moves on what is under way, and returns whether the sums are there. Never blocks.
  virtual bool advance() = 0;
  /// Until they are there; or, once they are finished, until it is free, before which the transport must not end.
  virtual void wait() = 0;
  /// Unpacks the bucket, whose sums are there.
  virtual void finish(BucketMemory& bucket, Backward backward) = 0;
  /// Of the block that this rank has for its buckets; 0: none.
  virtual int64_t shared_bytes() const { return 0; }
};

/// In memory of the host that all replicas read. most_bytes: of a bucket. Null, on all alike, where it cannot be had.
std::unique_ptr<BucketSum> sum_in_shared_memory(Transport& replicas, int tag, int64_t most_bytes);
/// By messages of the tags `tag` and `tag` + 1, beside the rest of a backward.
std::unique_ptr<BucketSum> sum_by_messages(Transport& replicas, int tag);
/// By what `hook`, which is waited for, makes of the gradients of a bucket.
std::unique_ptr<BucketSum> sum_by_hook(Transport& replicas, std::function<at::Tensor(const at::Tensor& gradients)> hook);

}  // namespace smp::runtime
