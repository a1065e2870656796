// Packing and unpacking of tensors that cross a cut.
#include "runtime/exchange/boundary.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <span>

#include "partitioner/graph/tensor_bytes.h"
#include "partitioner/plan/message_rules.h"
#include "runtime/libtorch/memory_tensor.h"

namespace smp::runtime {
namespace {

constexpr int64_t kAlignment = Device::kAlignment;
constexpr int64_t kMaxDims = 12;
constexpr size_t kMaxUnreserved = 64;    // buffers, free and kept although nobody has reserved them
constexpr uint32_t kMagic = 0x736d7031;  // "smp1"

struct Header {
  uint32_t magic = kMagic;
  uint8_t defined = 0;
  int8_t dtype = 0;
  uint8_t dims = 0;
  uint8_t misalignment = 0;  // of the data pointer, modulo 64
  uint8_t is_conj = 0;       // what the tensor means is not what its memory says: lazy conj() and its kin
  uint8_t is_neg = 0;
  uint8_t is_on_host = 0;  // a message lies in the memory of the rank's device
  int64_t data_bytes = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t strides[kMaxDims] = {};
};
constexpr int64_t kHeaderBytes = (static_cast<int64_t>(sizeof(Header)) + kAlignment - 1) / kAlignment * kAlignment;
static_assert(kHeaderBytes + kAlignment <= partitioner::kMessageOverheadBytes, "the planner counts longer messages");

[[noreturn]] void refuse(const std::string& what) {
  throw std::runtime_error("boundary: expected a packed tensor, got " + what +
                           ". Ranks run different programs or versions of smp.");
}

Header read_header(const MessageBuffer& buffer, int64_t num_bytes) {
  Header header;
  if (num_bytes < kHeaderBytes) refuse(std::to_string(num_bytes) + " bytes");
  buffer.device().copy(&header, buffer.data(), sizeof header);
  if (header.magic != kMagic || header.dims > kMaxDims || header.defined > 1 || header.misalignment >= kAlignment ||
      header.is_conj > 1 || header.is_neg > 1 || header.is_on_host > 1 || header.data_bytes < 0) {
    refuse("bytes that are none");
  }
  return header;
}

// Its memory is as large as its sizes and strides say.
void check_extent(const Header& header) {
  constexpr auto kUndefined = static_cast<int8_t>(c10::ScalarType::Undefined);
  const std::span<const int64_t> sizes(header.sizes, header.dims), strides(header.strides, header.dims);
  if (header.dtype < 0 || header.dtype >= kUndefined) refuse("one of an unknown type");
  if (partitioner::extent_bytes(sizes, strides, static_cast<c10::ScalarType>(header.dtype)) != header.data_bytes) {
    refuse("one of " + std::to_string(header.data_bytes) + " bytes, which do not fit its sizes and strides");
  }
}

}  // namespace

MessageBuffer::MessageBuffer(int64_t capacity_bytes, const Device& device)
    : device_(device), data_(device_.allocate(capacity_bytes)), capacity_bytes_(capacity_bytes) {}

// Buffers come back from tensors, which may die on any thread.
struct BufferPool::Shelf {
  struct Use {
    int64_t now = 0;
    int64_t most = 0;
  };
  std::mutex mutex;
  std::vector<std::unique_ptr<MessageBuffer>> free;
  std::map<int64_t, int64_t> reserved;  // by capacity
  size_t max_free = kMaxUnreserved;
  int64_t taken = 0;
  int64_t made = 0;
  std::map<int, Use> uses;  // by channel; entries stay where they are

  // The closest fit: a larger buffer is left for the messages it was made for, which would need a new one.
  std::unique_ptr<MessageBuffer> extract(int64_t num_bytes) {
    constexpr int64_t kReusableSlack = 2 * kAlignment;
    std::unique_ptr<MessageBuffer>* best = nullptr;
    for (auto& candidate : free) {
      if (candidate->capacity_bytes() < num_bytes || candidate->capacity_bytes() > num_bytes + kReusableSlack) continue;
      if (best == nullptr || candidate->capacity_bytes() < (*best)->capacity_bytes()) best = &candidate;
      if ((*best)->capacity_bytes() == num_bytes) break;
    }
    if (best == nullptr) return nullptr;
    std::unique_ptr<MessageBuffer> buffer = std::move(*best);
    *best = std::move(free.back());
    free.pop_back();
    return buffer;
  }
};

std::shared_ptr<BufferPool::Shelf> BufferPool::make_shelf() { return std::make_shared<Shelf>(); }

void BufferPool::reserve(const std::map<int64_t, int64_t>& count_by_capacity) {
  std::lock_guard<std::mutex> lock(shelf_->mutex);
  for (const auto& [capacity, count] : count_by_capacity) {
    int64_t& reserved = shelf_->reserved[capacity];
    for (; reserved < count; ++reserved, ++shelf_->max_free) {
      shelf_->free.push_back(std::make_unique<MessageBuffer>(capacity));
    }
  }
}

void BufferPool::keep_only(const std::map<int64_t, int64_t>& count_by_capacity) {
  std::vector<std::unique_ptr<MessageBuffer>> kept;
  std::lock_guard<std::mutex> lock(shelf_->mutex);
  std::map<int64_t, int64_t> num_kept;
  for (auto& buffer : shelf_->free) {
    const auto wanted = count_by_capacity.find(buffer->capacity_bytes());
    if (wanted == count_by_capacity.end() || num_kept[wanted->first] == wanted->second) continue;
    ++num_kept[wanted->first];
    kept.push_back(std::move(buffer));
  }
  std::swap(shelf_->free, kept);
  shelf_->max_free = kMaxUnreserved;
  for (auto& [capacity, reserved] : shelf_->reserved) {
    const auto wanted = count_by_capacity.find(capacity);
    reserved = wanted == count_by_capacity.end() ? 0 : std::min(reserved, wanted->second);
    shelf_->max_free += static_cast<size_t>(reserved);
  }
  std::erase_if(shelf_->reserved, [](const auto& entry) { return entry.second == 0; });
}

int64_t BufferPool::free_bytes() const {
  std::lock_guard<std::mutex> lock(shelf_->mutex);
  int64_t bytes = 0;
  for (const auto& buffer : shelf_->free) bytes += buffer->capacity_bytes();
  return bytes;
}

std::shared_ptr<MessageBuffer> BufferPool::take(int64_t num_bytes, int channel) {
  std::unique_ptr<MessageBuffer> buffer;
  Shelf::Use* use = nullptr;
  {
    std::lock_guard<std::mutex> lock(shelf_->mutex);
    use = &shelf_->uses[channel];
    use->most = std::max(use->most, ++use->now);
    buffer = shelf_->extract(num_bytes);
    ++shelf_->taken;
    if (!buffer) ++shelf_->made;
  }
  if (!buffer) buffer = std::make_unique<MessageBuffer>(num_bytes);
  return {buffer.release(), [shelf = shelf_, use](MessageBuffer* returned) {
            std::unique_ptr<MessageBuffer> owner(returned);
            std::lock_guard<std::mutex> lock(shelf->mutex);
            --use->now;
            if (shelf->free.size() < shelf->max_free) shelf->free.push_back(std::move(owner));
          }};
}

BufferStatistics BufferPool::statistics() const {
  std::lock_guard<std::mutex> lock(shelf_->mutex);
  BufferStatistics statistics{.taken = shelf_->taken, .made = shelf_->made, .most = {}};
  for (const auto& [channel, use] : shelf_->uses) statistics.most[channel] = use.most;
  return statistics;
}

int64_t max_message_bytes(const partitioner::TensorSpec& spec) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(spec.dtype));
  const int64_t extent = extent_bytes(spec.sizes, spec.strides, element_bytes);
  return kHeaderBytes + kAlignment + std::max(extent, spec.num_elements() * element_bytes);
}

std::shared_ptr<MessageBuffer> first_message(const partitioner::TensorSpec& spec, BufferPool& pool, int channel) {
  if (this_ranks_device().type == host().type) return pool.take(max_message_bytes(spec), channel);
  return std::make_shared<MessageBuffer>(kHeaderBytes, host());
}

int64_t following_capacity(int64_t announced_bytes, const partitioner::TensorSpec& spec) {
  return this_ranks_device().type == host().type ? announced_bytes : std::max(announced_bytes, max_message_bytes(spec));
}

PackedTensor pack(const at::Tensor& tensor, int64_t max_bytes, BufferPool& pool, int channel) {
  Header header;
  if (!tensor.defined()) {
    const bool is_host = this_ranks_device().type == host().type;
    PackedTensor packed{is_host ? pool.take(max_bytes, channel) : std::make_shared<MessageBuffer>(kHeaderBytes, host()),
                        kHeaderBytes};
    packed.buffer->device().copy(packed.buffer->data(), &header, sizeof header);
    return packed;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(is_on_this_ranks_device(tensor) || is_on_host(tensor),
                              "boundary: expected tensors of the rank's device or of the host between stages, got ",
                              tensor.toString(), ". Move it there in forward: tensor.to(other.device()).");
  TORCH_CHECK_NOT_IMPLEMENTED(tensor.dim() <= kMaxDims, "boundary: expected a tensor of at most ", kMaxDims,
                              " dimensions between stages, got ", tensor.dim());
  const void* data = data_of(tensor);
  header.defined = 1;
  header.dtype = static_cast<int8_t>(tensor.scalar_type());
  header.dims = static_cast<uint8_t>(tensor.dim());
  header.misalignment = static_cast<uint8_t>(reinterpret_cast<uintptr_t>(data) % kAlignment);
  header.is_conj = tensor.is_conj();
  header.is_neg = tensor.is_neg();
  header.is_on_host = is_on_host(tensor);
  header.data_bytes = extent_bytes(tensor.sizes(), tensor.strides(), static_cast<int64_t>(tensor.element_size()));
  std::copy(tensor.sizes().begin(), tensor.sizes().end(), header.sizes);
  std::copy(tensor.strides().begin(), tensor.strides().end(), header.strides);
  const int64_t num_bytes = kHeaderBytes + header.misalignment + header.data_bytes;
  const auto all = pool.take(std::max(num_bytes, max_bytes), channel);
  all->device().copy(all->data() + kHeaderBytes + header.misalignment, data, header.data_bytes);
  PackedTensor packed{all, num_bytes};
  const bool is_host = all->device().type == host().type;
  if (!is_host && header.data_bytes == 0) {
    packed = {std::make_shared<MessageBuffer>(kHeaderBytes, host()), kHeaderBytes};
  } else if (!is_host || num_bytes > max_bytes) {
    packed = {is_host ? all : std::make_shared<MessageBuffer>(kHeaderBytes, host()), kHeaderBytes, all, kHeaderBytes,
              num_bytes - kHeaderBytes};
  }
  packed.buffer->device().copy(packed.buffer->data(), &header, sizeof header);
  return packed;
}

int64_t announced_bytes(const MessageBuffer& buffer, int64_t num_bytes) {
  const Header header = read_header(buffer, num_bytes);
  if (num_bytes != kHeaderBytes || header.data_bytes == 0) return 0;
  check_extent(header);
  return header.misalignment + header.data_bytes;
}

at::Tensor unpack(const std::shared_ptr<MessageBuffer>& buffer, int64_t num_bytes, const partitioner::TensorSpec& spec,
                  const std::shared_ptr<MessageBuffer>& following) {
  const Header header = read_header(*buffer, num_bytes);
  if (header.defined == 0) {
    if (num_bytes != kHeaderBytes) refuse("an undefined one with data");
    return {};
  }
  const at::IntArrayRef sizes(header.sizes, header.dims), strides(header.strides, header.dims);
  check_extent(header);
  const int64_t data_bytes = num_bytes == kHeaderBytes ? 0 : num_bytes - kHeaderBytes - header.misalignment;
  if (!following && data_bytes != header.data_bytes) refuse("a truncated one");
  if (!sizes.equals(spec.sizes) || header.dtype != static_cast<int8_t>(spec.dtype)) {
    refuse(c10::str("one of sizes ", sizes, " and type ", static_cast<c10::ScalarType>(header.dtype), " instead of ",
                    at::IntArrayRef(spec.sizes), " and ", spec.dtype));
  }
  if (header.is_conj != 0 && !c10::isComplexType(spec.dtype)) refuse("the conjugate of a real one");
  if (!following && buffer->device().type != this_ranks_device().type) {  // a header alone: the tensor is empty
    return tensor_on(header.is_on_host ? host() : this_ranks_device(), nullptr, sizes, strides, spec.dtype, nullptr);
  }
  auto holder = following ? following : buffer;
  char* begin = holder->data() + (following ? 0 : kHeaderBytes);
  if (header.is_on_host && holder->device().type != host().type) {
    const int64_t all_bytes = header.misalignment + header.data_bytes;
    const auto here = std::make_shared<MessageBuffer>(all_bytes, host());
    holder->device().copy(here->data(), begin, all_bytes);
    holder = here;
    begin = here->data();
  }
  at::Tensor tensor = tensor_on(holder->device(), begin + header.misalignment, sizes, strides, spec.dtype, holder);
  if (header.is_conj) tensor._set_conj(true);
  if (header.is_neg) tensor._set_neg(true);
  return tensor;
}

}  // namespace smp::runtime
