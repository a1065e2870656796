// POSIX: write, fsync, rename, fsync of the folder.
#include "smp/detail/durable_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

namespace smp::detail {

DurableFile::DurableFile(std::string path)
    : path_(std::move(path)), temporary_(path_ + ".writing") {
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail("open");
}

DurableFile::DurableFile(DurableFile&& other) noexcept
    : path_(std::move(other.path_)),
      temporary_(std::move(other.temporary_)),
      file_(std::exchange(other.file_, -1)) {}

DurableFile::~DurableFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void DurableFile::fail(const char* what) const {
  TORCH_CHECK(false, "expected to ", what, " '", temporary_,
              "', got an error: ", std::strerror(errno), ".");
}

void DurableFile::write(const void* data, size_t num_bytes) {
  const char* next = static_cast<const char*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::write(file_, next, std::min<size_t>(num_bytes, size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write");
    next += written;
    num_bytes -= static_cast<size_t>(written);
  }
}

void DurableFile::flush() {
  if (::fsync(file_) != 0) fail("flush");
}

void DurableFile::commit() {
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
  ::close(std::exchange(file_, -1));
  const std::string folder = std::filesystem::absolute(path_).parent_path();
  const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0) return;  // the file is there; some file systems do not open folders
  ::fsync(opened);
  ::close(opened);
}

}  // namespace smp::detail
