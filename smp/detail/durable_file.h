// Owns a file while it is written: under a temporary name, so that the real name never holds half
// of it.
#pragma once

#include <cstddef>
#include <string>

namespace smp::detail {

/// Without commit() nothing is left of it. Every function that is not noexcept throws with the
/// system's reason.
class DurableFile {
 public:
  /// Opens `path` + ".writing"; its folder must exist.
  explicit DurableFile(std::string path);
  ~DurableFile();
  DurableFile(DurableFile&& other) noexcept;
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, size_t num_bytes);
  /// Returns when all that was written is on the disk.
  void flush();
  /// Gives it its name, in place of a file that has it.
  void commit();
  /// The same, so that undo() can put the earlier file back. One of the two below must follow.
  void commit_keeping_earlier();
  void forget_earlier() noexcept;
  /// The earlier file, or none, as before commit_keeping_earlier(), whether that has thrown or not.
  void undo() noexcept;

 private:
  void fail(const char* what) const;

  std::string path_, temporary_;
  std::string earlier_{};  // where the earlier file is kept; empty: there is none
  bool is_committed_ = false;
  int file_ = -1;
};

}  // namespace smp::detail
