// Clocks, memory and what is reported.
#include "tests/fake_gpu/order.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace smp::fake_gpu {
namespace {

constexpr int64_t kRounding = 512, kMemoryBytes = int64_t{8} << 30;
constexpr int kAskedInVain = 4;  // times that an event is not reached, if nobody waits

thread_local Stream current_stream = 0;
thread_local Clock host_of_thread;  // what this thread of the host has waited for

void merge(Clock& into, const Clock& from) {
  for (const auto& [stream, tick] : from) into[stream] = std::max(into[stream], tick);
}

char* new_memory(int64_t num_bytes) {
  void* data = std::aligned_alloc(kRounding, static_cast<size_t>(num_bytes));
  TORCH_CHECK(data != nullptr, "no ", num_bytes, " bytes");
  return static_cast<char*>(data);
}

struct Held {
  BlockPtr block;
  std::shared_ptr<Pool> pool;
};

struct Pinned {
  char* data;
  int64_t bytes;
};

}  // namespace

Pool::~Pool() {
  for (const BlockPtr& block : blocks) std::free(block->data);
}

// Never destroyed: tensors may end after it would be.
Gpu& Gpu::the() {
  static Gpu& gpu = *new Gpu();
  return gpu;
}

Stream Gpu::current() { return current_stream; }
Stream Gpu::exchange(Stream stream) { return std::exchange(current_stream, stream); }

Stream Gpu::stream_from_pool() {
  constexpr Stream kNumStreams = 32;
  const std::lock_guard lock(mutex_);
  last_of_pool_ = last_of_pool_ % kNumStreams + 1;
  return last_of_pool_;
}

std::shared_ptr<Pool>& Gpu::pool_of_thread() {
  static thread_local std::shared_ptr<Pool> pool;
  return pool;
}

c10::DataPtr Gpu::allocate(int64_t num_bytes) {
  const c10::Device device(c10::kCUDA, 0);
  if (num_bytes == 0) return {nullptr, device};
  const int64_t rounded = (num_bytes + kRounding - 1) / kRounding * kRounding;
  const std::lock_guard lock(mutex_);
  BlockPtr block;
  const auto& pool = pool_of_thread();
  if (pool) {
    const auto fits = [&](const BlockPtr& each) { return each->is_freed && each->bytes == rounded; };
    const auto found = std::find_if(pool->blocks.begin(), pool->blocks.end(), fits);
    if (found != pool->blocks.end()) block = *found;
  }
  if (!block) {
    block = std::make_shared<Block>(Block{.data = new_memory(rounded), .bytes = rounded, .stream = current_stream});
    block->is_of_pool = pool != nullptr;
    if (pool) pool->blocks.push_back(block);
  }
  block->is_freed = false;
  if (!pool) std::memset(block->data, kGarbage, static_cast<size_t>(rounded));
  blocks_[block->data] = block;
  used_bytes_ += rounded;
  const auto done = [](void* kept) {
    const std::unique_ptr<Held> held(static_cast<Held*>(kept));
    the().free(held->block);
  };
  return {block->data, new Held{block, pool}, done, device};
}

// Whatever the allocator's stream is given next may write to the memory.
void Gpu::free(const BlockPtr& block) {
  const std::lock_guard lock(mutex_);
  used_bytes_ -= block->bytes;
  block->is_freed = true;
  blocks_.erase(block->data);
  if (block->is_of_pool) return;
  Clock& clock = clocks_[block->stream];
  merge(clock, host_of_thread);
  const auto look = [&](const Access& access) {
    if (!knows(clock, access) && !block->shared_with.contains(access.stream)) {
      problems_.push_back("memory of stream " + std::to_string(block->stream) + " is free for it while stream " +
                          std::to_string(access.stream) + " may not have come to " + access.what);
    }
  };
  for (const Access& access : block->accesses) look(access);
  std::memset(block->data, kGarbage, static_cast<size_t>(block->bytes));
  std::free(block->data);
}

void Gpu::share(const c10::DataPtr& memory, Stream stream) {
  if (const BlockPtr block = find(memory.get())) {
    const std::lock_guard lock(mutex_);
    block->shared_with.insert(stream);
  }
}

BlockPtr Gpu::find_locked(const void* data) {
  auto after = blocks_.upper_bound(static_cast<const char*>(data));
  if (after == blocks_.begin()) return nullptr;
  const BlockPtr& block = std::prev(after)->second;
  return data < block->data + block->bytes ? block : nullptr;
}

BlockPtr Gpu::find(const void* data) {
  const std::lock_guard lock(mutex_);
  return find_locked(data);
}

std::vector<Range> Gpu::ranges(const void* data, int64_t num_bytes) {
  const BlockPtr block = num_bytes > 0 ? find(data) : nullptr;
  if (!block) return {};
  const int64_t begin = static_cast<const char*>(data) - block->data;
  return {{block, begin, begin + num_bytes}};
}

int64_t Gpu::free_bytes() {
  const std::lock_guard lock(mutex_);
  return kMemoryBytes - used_bytes_;
}

// The next of the stream, behind all that the host has waited for.
Clock& Gpu::begin(Stream stream) {
  Clock& clock = clocks_[stream];
  merge(clock, host_of_thread);
  ++clock[stream];
  return clock;
}

bool Gpu::knows(const Clock& clock, const Access& access) const {
  const auto found = clock.find(access.stream);
  return access.tick == 0 || (found != clock.end() && found->second >= access.tick);
}

// Of those before it that overlap, one of the two writing, each has to be known.
void Gpu::touch(const Clock& clock, const Range& range, const Access& now) {
  Access access = now;
  access.begin = range.begin;
  access.end = range.end;
  std::vector<Access>& before = range.block->accesses;
  for (const Access& each : before) {
    const bool overlaps = each.begin < access.end && access.begin < each.end;
    if (!overlaps || !(each.is_write || access.is_write) || knows(clock, each)) continue;
    problems_.push_back(access.what + " on stream " + std::to_string(access.stream) +
                        (access.is_write ? " writes" : " reads") + " bytes of " + std::to_string(range.block->bytes) +
                        " that " + each.what + " on stream " + std::to_string(each.stream) +
                        (each.is_write ? " writes" : " reads") + ", and nothing orders the two");
  }
  // Who knows this one knows those too.
  std::erase_if(before, [&](const Access& each) {
    const bool is_covered = access.begin <= each.begin && each.end <= access.end;
    return is_covered && knows(clock, each) && (access.is_write || !each.is_write);
  });
  before.push_back(std::move(access));
}

void Gpu::launch(const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes) {
  const std::lock_guard lock(mutex_);
  const Clock& clock = begin(current_stream);
  Access now{.stream = current_stream, .tick = clock.at(current_stream), .what = what};
  for (const auto* ranges : {&reads, &writes}) {
    now.is_write = ranges == &writes;
    for (const Range& range : *ranges) {
      TORCH_CHECK(!range.block->is_freed || range.block->is_of_pool, what, " uses memory that has been given back");
      touch(clock, range, now);
    }
  }
}

Recorded Gpu::record(Stream stream) {
  const std::lock_guard lock(mutex_);
  Clock& clock = clocks_[stream];
  merge(clock, host_of_thread);
  return {.clock = clock};
}

void Gpu::go_on_behind(Stream stream, const Recorded& event) {
  const std::lock_guard lock(mutex_);
  merge(clocks_[stream], event.clock);
}

std::vector<c10::Storage> Gpu::learn(const Clock& clock) {
  merge(host_of_thread, clock);
  std::vector<c10::Storage> done;
  const auto is_there = [&](const HostCopy& copy) {
    if (!knows(host_of_thread, {copy.stream, copy.tick, {}})) return false;
    if (copy.is_to_host) {
      std::memcpy(copy.host, copy.bytes.data(), copy.bytes.size());
    } else if (std::memcmp(copy.host, copy.bytes.data(), copy.bytes.size()) != 0) {
      problems_.push_back("memory of the host has changed before stream " + std::to_string(copy.stream) + " had read it");
    }
    if (copy.kept) done.push_back(copy.kept);
    return true;
  };
  std::erase_if(copies_, is_there);
  return done;
}

void Gpu::wait(const Recorded& event) {
  std::vector<c10::Storage> done;  // whose end takes the lock
  const std::lock_guard lock(mutex_);
  done = learn(event.clock);
}

bool Gpu::has_reached(Recorded& event) {
  std::vector<c10::Storage> done;
  const std::lock_guard lock(mutex_);
  const bool is_known = std::all_of(event.clock.begin(), event.clock.end(),
                                    [&](const auto& each) { return knows(host_of_thread, {each.first, each.second, {}}); });
  if (!is_known && event.num_asked++ < kAskedInVain) return false;
  done = learn(event.clock);
  return true;
}

void Gpu::start_copy(void* to, const void* from, int64_t num_bytes) {
  if (num_bytes == 0) return;
  const std::vector<Range> source = ranges(from, num_bytes), target = ranges(to, num_bytes);
  launch("a copy", source, target);
  const auto size = static_cast<size_t>(num_bytes);
  if (!target.empty() && !source.empty()) {
    std::memmove(to, from, size);
    return;
  }
  const std::lock_guard lock(mutex_);
  HostCopy copy{.stream = current_stream,
                .tick = clocks_[current_stream][current_stream],
                .host = static_cast<char*>(target.empty() ? to : const_cast<void*>(from)),
                .is_to_host = target.empty(),
                .bytes = std::string(static_cast<const char*>(from), size)};
  if (copy.is_to_host) {
    std::memset(to, kGarbage, size);
  } else {
    std::memcpy(to, from, size);
  }
  copies_.push_back(std::move(copy));
}

c10::DataPtr Gpu::allocate_pinned(int64_t num_bytes) {
  const c10::Device host(c10::kCPU);
  if (num_bytes == 0) return {nullptr, host};
  const int64_t rounded = (num_bytes + kRounding - 1) / kRounding * kRounding;
  char* const data = new_memory(rounded);
  const auto done = [](void* kept) {
    const std::unique_ptr<Pinned> pinned(static_cast<Pinned*>(kept));
    the().drop_copies(pinned->data, pinned->data + pinned->bytes);
    std::free(pinned->data);
  };
  const std::lock_guard lock(mutex_);
  pinned_[data] = rounded;
  return {data, new Pinned{data, rounded}, done, host};
}

bool Gpu::is_pinned(const void* data) {
  const std::lock_guard lock(mutex_);
  const auto after = pinned_.upper_bound(static_cast<const char*>(data));
  return after != pinned_.begin() && data < std::prev(after)->first + std::prev(after)->second;
}

void Gpu::reads_later(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  auto* const data = static_cast<char*>(storage.mutable_data());
  copies_.push_back({.stream = current_stream,
                     .tick = clocks_[current_stream][current_stream],
                     .host = data,
                     .is_to_host = false,
                     .bytes = std::string(data, storage.nbytes()),
                     .kept = storage});
}

void Gpu::drop_copies(const char* begin, const char* end) {
  const std::lock_guard lock(mutex_);
  pinned_.erase(begin);
  if (std::erase_if(copies_, [&](const HostCopy& copy) { return copy.host >= begin && copy.host < end; }) == 0) return;
  problems_.push_back("pinned memory ends before the host has waited for the copy that uses it");
}

std::vector<std::string> Gpu::take_problems() {
  const std::lock_guard lock(mutex_);
  return std::exchange(problems_, {});
}

}  // namespace smp::fake_gpu
