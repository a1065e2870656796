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
      earlier_(std::exchange(other.earlier_, {})),
      is_committed_(other.is_committed_),
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
  is_committed_ = true;
  ::close(std::exchange(file_, -1));
  const std::string folder = std::filesystem::absolute(path_).parent_path();
  const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0) return;  // the file is there; some file systems do not open folders
  ::fsync(opened);
  ::close(opened);
}

// A second name for the earlier file, or where the file system has no such thing, a copy: the first name always holds a
// whole file.
void DurableFile::commit_keeping_earlier() {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_regular_file(path_, error)) {
    const std::string kept = path_ + ".earlier";
    fs::remove(kept, error);
    fs::create_hard_link(path_, kept, error);
    if (error) fs::copy_file(path_, kept);
    earlier_ = kept;
  }
  commit();
}

void DurableFile::forget_earlier() noexcept {
  if (!earlier_.empty()) ::unlink(earlier_.c_str());
  earlier_.clear();
}

void DurableFile::undo() noexcept {
  if (is_committed_ && earlier_.empty()) ::unlink(path_.c_str());
  if (is_committed_ && !earlier_.empty()) std::rename(earlier_.c_str(), path_.c_str());
  is_committed_ = false;
  forget_earlier();
}

}  // namespace smp::detail
