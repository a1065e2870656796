// What crosses a cut: one tensor per message, geometry and alignment kept. Owns message buffers, no transport.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <vector>

#include "partitioner/graph/graph.h"
#include "runtime/device/device.h"

namespace smp::runtime {

/// Memory of one message. Goes back to its pool when the last holder lets go. From LibTorch's
/// allocator, so that its memory profilers see what a rank holds in messages: received activations stay there.
class MessageBuffer {
 public:
  explicit MessageBuffer(int64_t capacity_bytes, const Device& device = this_ranks_device());
  MessageBuffer(const MessageBuffer&) = delete;
  MessageBuffer& operator=(const MessageBuffer&) = delete;
  char* data() const { return static_cast<char*>(data_.get()); }
  int64_t capacity_bytes() const { return capacity_bytes_; }
  const Device& device() const { return device_; }
  /// A part of it, as messages are made of.
  DeviceMemory memory(int64_t num_bytes, int64_t begin = 0) const { return {data() + begin, num_bytes, device_.type}; }

 private:
  const Device& device_;
  c10::DataPtr data_;
  int64_t capacity_bytes_;
};

/// What a pool has done so far.
struct BufferStatistics {
  int64_t taken = 0;            // buffers handed out
  int64_t made = 0;             // of those, for want of a free one; reserved ones do not count
  std::map<int, int64_t> most;  // in use at once, by channel
};

/// Reuses message buffers, so that the steady state allocates nothing per message.
class BufferPool {
 public:
  /// `channel`: for the statistics, any number.
  std::shared_ptr<MessageBuffer> take(int64_t num_bytes, int channel = 0);
  BufferStatistics statistics() const;

  /// Makes buffers until there are as many of each capacity as asked for, by this and all earlier calls. Messages that
  /// fit them allocate nothing from then on.
  void reserve(const std::map<int64_t, int64_t>& count_by_capacity);
  /// Forgets what was reserved beyond these, with the buffers made for it and all others that are free.
  void keep_only(const std::map<int64_t, int64_t>& count_by_capacity);
  /// Bytes of buffers that are free.
  int64_t free_bytes() const;

 private:
  struct Shelf;
  std::shared_ptr<Shelf> shelf_ = make_shelf();
  static std::shared_ptr<Shelf> make_shelf();
};

/// A packed tensor, ready to be sent. When it is longer than the receiver expects (a gradient that is a slice of a
/// larger tensor), the message is the header alone and the data follow in a second message. So they do from a device that is
/// not the host: a header in its memory would have to be waited for by whoever reads it.
struct PackedTensor {
  std::shared_ptr<MessageBuffer> buffer;
  int64_t num_bytes = 0;                       // of the first message
  std::shared_ptr<MessageBuffer> following{};  // of the second; null: there is none
  int64_t following_begin = 0, following_bytes = 0;
};

/// Largest message that a value of this spec makes in the forward direction.
int64_t max_message_bytes(const partitioner::TensorSpec& spec);
/// What it is received into: all of it, or on a device that is not the host its header.
std::shared_ptr<MessageBuffer> first_message(const partitioner::TensorSpec& spec, BufferPool& pool, int channel);
/// Of a buffer for the second message, as announced: on a device all data come so, and take the buffers that are reserved.
int64_t following_capacity(int64_t announced_bytes, const partitioner::TensorSpec& spec);

/// Packs header (dtype, sizes, strides, alignment, definedness) and data. Strided tensors travel with their strides
/// and gaps, expanded ones as their base: a copy in another layout would change the bits of the operators after it,
/// and so would another alignment of the data, since kernels take other ways through unaligned ones.
PackedTensor pack(const at::Tensor& tensor, int64_t max_bytes, BufferPool& pool, int channel = 0);

/// Bytes of the second message that the header in a received first one announces; 0: there is none.
int64_t announced_bytes(const MessageBuffer& buffer, int64_t num_bytes);

/// The tensor in a received message, on the buffer's own memory. Throws std::runtime_error when the bytes are no such
/// message or the tensor is not of the sizes and dtype of `spec`. `following`: the second message, where one was announced.
at::Tensor unpack(const std::shared_ptr<MessageBuffer>& buffer, int64_t num_bytes, const partitioner::TensorSpec& spec,
                  const std::shared_ptr<MessageBuffer>& following = nullptr);

}  // namespace smp::runtime
