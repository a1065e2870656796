// Owns a file while it is written: under a temporary name, so that the real name never holds half
// of it, and in place of nothing but a file of this user.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <string>

namespace smp::engine {

/// Without commit() nothing is left of it; a process that is killed leaves PATH.RANDOM.writing.
/// Every function that is not noexcept throws c10::Error with the system's reason.
class DurableFile {
 public:
  /// Makes the temporary file; the folder must exist. Throws c10::ValueError where `path` is
  /// something that is not to be replaced, see obstacle().
  explicit DurableFile(std::string path);
  ~DurableFile();
  DurableFile(const DurableFile&) = delete;
  DurableFile& operator=(const DurableFile&) = delete;

  void write(const void* data, size_t num_bytes);
  /// Returns when all that was written is on the disk.
  void flush();
  /// Flushes, then gives it its name, in place of a file that has it.
  void commit();

 private:
  void check_destination() const;
  void take_permissions() const;
  void discard() noexcept;
  void fail(const char* what) const;

  std::string path_, temporary_;
  int file_ = -1;
};

/// What keeps a file of `owner` from taking the place of what is at `path`, or from removing it: "a symbolic link", "a
/// folder", "a file of user 7"; empty for a regular file of `owner`, and for nothing at all.
std::string obstacle(const std::string& path, uid_t owner);

/// 16 hexadecimal digits that nobody can foresee.
std::string random_digits();
/// 16 of them.
std::string hex_digits(uint64_t number);

}  // namespace smp::engine
