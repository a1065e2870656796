// POSIX: write, fsync, rename, fsync of the folder.
#include "smp/engine/files/durable_file.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "smp/engine/files/input_file.h"

namespace smp::engine {

std::string obstacle(const std::string& path, uid_t owner) {
  struct stat status{};
  if (::lstat(path.c_str(), &status) != 0) return errno == ENOENT ? "" : std::strerror(errno);
  if (!S_ISREG(status.st_mode)) return kind_of_file(status.st_mode);
  return status.st_uid == owner ? "" : "a file of user " + std::to_string(status.st_uid);
}

std::string hex_digits(uint64_t number) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(number));
  return digits;
}

std::string random_digits() {
  uint64_t number = 0;
  TORCH_CHECK(::getrandom(&number, sizeof number, 0) == sizeof number,
              "expected random numbers from the system, got an error: ", std::strerror(errno), ".");
  return hex_digits(number);
}

DurableFile::DurableFile(std::string path) : path_(std::move(path)), temporary_(path_ + "." + random_digits() + ".writing") {
  constexpr int kNewFile = O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC;
  file_ = ::open(temporary_.c_str(), kNewFile, 0666);
  if (file_ < 0) fail("open");
  try {
    check_destination();
    take_permissions();
  } catch (...) {
    discard();
    throw;
  }
}

DurableFile::~DurableFile() { discard(); }

void DurableFile::discard() noexcept {
  if (file_ < 0) return;
  ::close(std::exchange(file_, -1));
  ::unlink(temporary_.c_str());
}

// Some file systems give all files an owner of their own, so this file tells what our files look like.
void DurableFile::check_destination() const {
  struct stat status{};
  if (::fstat(file_, &status) != 0) fail("look at");
  const std::string found = obstacle(path_, status.st_uid);
  TORCH_CHECK_VALUE(found.empty(), "expected nothing or a regular file of this user at '", path_,
                    "', which is to be replaced, got ", found, ". Remove it or name another file.");
}

void DurableFile::take_permissions() const {
  struct stat replaced{};
  constexpr mode_t kPermissions = 0777;
  const bool is_there = ::lstat(path_.c_str(), &replaced) == 0 && S_ISREG(replaced.st_mode);
  if (is_there && ::fchmod(file_, replaced.st_mode & kPermissions) != 0)
    fail("give the permissions of the file that it replaces to");
}

void DurableFile::fail(const char* what) const {
  TORCH_CHECK(false, "expected to ", what, " '", temporary_, "', got an error: ", std::strerror(errno), ".");
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
  flush();
  check_destination();  // it may have been long ago
  if (std::rename(temporary_.c_str(), path_.c_str()) != 0) fail("rename");
  ::close(std::exchange(file_, -1));
  const std::string folder = std::filesystem::absolute(path_).parent_path();
  const int opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (opened < 0) return;  // the file is there; some file systems do not open folders, or do not flush them
  const bool failed = ::fsync(opened) != 0 && (errno == EIO || errno == ENOSPC);
  const int error = errno;
  ::close(opened);
  TORCH_CHECK(!failed, "expected to flush folder '", folder, "', got an error: ", std::strerror(error), ".");
}

}  // namespace smp::engine
