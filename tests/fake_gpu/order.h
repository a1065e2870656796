// What a GPU that is none was given to do, in which order, and what nothing orders.
//
// Everything is done at once, on the host, when it is given. Whether it could have been done in another order is found
// by vector clocks, as a race detector of threads does (Lamport, 1978; Fidge, 1988): each stream counts what it is given,
// and each of these knows how far every stream had come when it began. Two that touch the same memory, one of them writing
// to it, and of which neither knows the other, are a problem on a GPU, however fast that is.
#pragma once

#include <c10/core/Storage.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace smp::fake_gpu {

constexpr int kGarbage = 0xff;  // in memory without values: NaN, and no index

using Stream = int64_t;
/// How far streams have come; those that are missing have not begun.
using Clock = std::map<Stream, uint64_t>;

struct Access {
  Stream stream = 0;
  uint64_t tick = 0;  // of its stream
  std::string what{};
  int64_t begin = 0, end = 0;  // bytes of the block
  bool is_write = false;
};

struct Block {
  char* data = nullptr;
  int64_t bytes = 0;
  Stream stream = 0;  // that uses it again
  bool is_of_pool = false, is_freed = false;
  std::set<Stream> shared_with{};  // its end waits for these
  std::vector<Access> accesses{};  // that later ones must know
};
using BlockPtr = std::shared_ptr<Block>;

/// Bytes of a block.
struct Range {
  BlockPtr block;
  int64_t begin = 0, end = 0;
};

/// Memory that graphs have for themselves: what is freed is used again by later recordings in it, and given back at its end.
struct Pool {
  ~Pool();
  std::vector<BlockPtr> blocks{};  // all, free or not
};

/// What has been given to a stream until then.
struct Recorded {
  Clock clock{};
  int num_asked = 0;
};

class Gpu {
 public:
  static Gpu& the();

  static Stream current();
  static Stream exchange(Stream stream);
  /// Of 32, by turns, as LibTorch's.
  Stream stream_from_pool();
  /// While a recording goes on, memory of this thread is of its pool.
  static std::shared_ptr<Pool>& pool_of_thread();

  c10::DataPtr allocate(int64_t num_bytes);
  void share(const c10::DataPtr& memory, Stream stream);
  /// Of the device; null: of the host.
  BlockPtr find(const void* data);
  /// None where these bytes are of the host.
  std::vector<Range> ranges(const void* data, int64_t num_bytes);
  int64_t free_bytes();

  /// Given to the current stream now.
  void launch(const std::string& what, const std::vector<Range>& reads, const std::vector<Range>& writes);
  Recorded record(Stream stream);
  void go_on_behind(Stream stream, const Recorded& event);
  void wait(const Recorded& event);
  /// False when asked for the first times, unless the host knows.
  bool has_reached(Recorded& event);

  /// Memory of the host that the device reads or writes when it comes there: what it reads may not change until the host
  /// has waited, and what it writes is there only then.
  void start_copy(void* to, const void* from, int64_t num_bytes);
  c10::DataPtr allocate_pinned(int64_t num_bytes);
  bool is_pinned(const void* data);
  /// Of pinned memory that the device has been told to read: `storage` stays until it has.
  void reads_later(const c10::Storage& storage);

  /// Found since the last call.
  std::vector<std::string> take_problems();

 private:
  struct HostCopy {
    Stream stream;
    uint64_t tick;
    char* host;
    bool is_to_host;
    std::string bytes;
    c10::Storage kept{};
  };

  Clock& begin(Stream stream);
  bool knows(const Clock& clock, const Access& access) const;
  void touch(const Clock& clock, const Range& range, const Access& now);
  std::vector<c10::Storage> learn(const Clock& clock);
  void free(const BlockPtr& block);
  void drop_copies(const char* begin, const char* end);
  BlockPtr find_locked(const void* data);

  std::mutex mutex_;
  std::map<Stream, Clock> clocks_;
  std::map<const char*, BlockPtr> blocks_;
  std::map<const char*, int64_t> pinned_;  // bytes from there
  std::vector<HostCopy> copies_;
  std::vector<std::string> problems_;
  int64_t used_bytes_ = 0;
  Stream last_of_pool_ = 0;
};

}  // namespace smp::fake_gpu
