// POSIX: stat, open, fstat, read.
#include "smp/engine/files/input_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace smp::engine {

const char* kind_of_file(mode_t mode) {
  if (S_ISREG(mode)) return "a regular file";
  if (S_ISLNK(mode)) return "a symbolic link";
  if (S_ISDIR(mode)) return "a folder";
  if (S_ISFIFO(mode)) return "a FIFO";
  if (S_ISSOCK(mode)) return "a socket";
  return "a device";
}

InputFile::InputFile(std::string path, std::string expected) : path_(std::move(path)), expected_(std::move(expected)) {
  struct stat status{};
  const auto check = [&](int result) {
    if (result != 0) fail(std::strerror(errno));
    if (!S_ISREG(status.st_mode)) fail(std::string("it is ") + kind_of_file(status.st_mode));
  };
  // Before it is opened, since that alone wakes the writer of a FIFO; and after, since it may have been exchanged.
  check(::stat(path_.c_str(), &status));
  file_ = ::open(path_.c_str(), O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
  if (file_ < 0) fail(std::strerror(errno));
  try {
    check(::fstat(file_, &status));
  } catch (...) {
    ::close(file_);
    throw;
  }
  num_bytes_ = static_cast<uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(file_); }

void InputFile::fail(const std::string& reason) const {
  TORCH_CHECK(false, expected_, ", got '", path_, "': ", reason, ".");
}

void InputFile::read(void* data, uint64_t num_bytes) {
  char* next = static_cast<char*>(data);
  while (num_bytes > 0) {
    const ssize_t done = ::read(file_, next, std::min<uint64_t>(num_bytes, uint64_t{1} << 30));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) fail(std::strerror(errno));
    if (done == 0) fail("it ends " + std::to_string(num_bytes) + " bytes too early");
    next += done;
    num_bytes -= static_cast<uint64_t>(done);
  }
}

std::string InputFile::read_all() {
  constexpr uint64_t kMostBytes = uint64_t{1} << 28;  // texts are smaller
  if (num_bytes_ > kMostBytes) fail("it has " + std::to_string(num_bytes_) + " bytes, more than any of its kind");
  std::string text(num_bytes_, '\0');
  read(text.data(), num_bytes_);
  return text;
}

}  // namespace smp::engine
