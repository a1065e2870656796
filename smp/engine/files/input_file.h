// Owns a file while it is read. Only regular files: to open a FIFO would block, and a device may have no end.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace smp::engine {

/// Follows symbolic links. `expected` begins all messages: "expected a JSON file".
class InputFile {
 public:
  /// Throws c10::Error with what is there instead of a regular file, or the system's reason.
  InputFile(std::string path, std::string expected);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t num_bytes() const { return num_bytes_; }
  /// The next bytes; throws c10::Error where there are fewer.
  void read(void* data, uint64_t num_bytes);
  /// All of it; before anything else is read.
  std::string read_all();

 private:
  [[noreturn]] void fail(const std::string& reason) const;

  std::string path_, expected_;
  int file_ = -1;
  uint64_t num_bytes_ = 0;
};

/// What is there by the `mode` of its status: "a folder", "a FIFO".
const char* kind_of_file(mode_t mode);

}  // namespace smp::engine
