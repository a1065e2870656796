// What is written takes the place of regular files of this user only, and what is read is a regular file.
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

#include "smp/engine/files/durable_file.h"
#include "smp/smp.h"
#include "tests/support/messages.h"
#include "tests/unit/examples/temporary_folder.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;

bool make_socket(const std::string& path) {
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  if (path.size() >= sizeof address.sun_path) return false;
  path.copy(address.sun_path, path.size());
  const int made = socket(AF_UNIX, SOCK_STREAM, 0);
  const bool is_made = bind(made, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  close(made);
  return is_made;
}

// What may stand at a path, as messages call it. To make the last two takes rights that not every
// user has: then they return false.
struct Obstacle {
  std::string name;
  std::function<bool(const std::string& path)> make;
};
const Obstacle kObstacles[] = {
    {"a symbolic link", [](const auto& path) { return symlink("victim", path.c_str()) == 0; }},
    {"a symbolic link", [](const auto& path) { return symlink("nothing", path.c_str()) == 0; }},
    {"a folder", [](const auto& path) { return mkdir(path.c_str(), 0700) == 0; }},
    {"a FIFO", [](const auto& path) { return mkfifo(path.c_str(), 0600) == 0; }},
    {"a socket", make_socket},
    {"a device", [](const auto& path) { return mknod(path.c_str(), S_IFCHR | 0600, makedev(1, 3)) == 0; }},
    {"a file of user 12345",
     [](const auto& path) { return mknod(path.c_str(), S_IFREG | 0600, 0) == 0 && chown(path.c_str(), 12345, -1) == 0; }}};

class RegularFile : public testing::Test {
 protected:
  RegularFile() { folder_.write("victim", "untouched"); }
  ~RegularFile() override { EXPECT_EQ(folder_.read("victim"), "untouched"); }

  std::string path() const { return folder_.path("a.safetensors"); }
  std::ptrdiff_t num_files() const { return std::distance(std::filesystem::directory_iterator(folder_.path()), {}); }

  TemporaryFolder folder_;
  const Safetensors file_{.tensors = {{"a", torch::ones({2})}}, .metadata = {}};
};

TEST_F(RegularFile, OfThisUserIsAllThatIsReplaced) {
  for (const auto& [name, make] : kObstacles) {
    if (!make(path())) {
      std::filesystem::remove(path());
      continue;
    }
    struct stat before{}, after{};
    lstat(path().c_str(), &before);
    const std::string text = message_of<c10::ValueError>([&] { write_safetensors(path(), file_); });
    EXPECT_TRUE(contains(text, "'" + path() + "', which is to be replaced, got " + name)) << text;
    lstat(path().c_str(), &after);
    EXPECT_EQ(before.st_ino, after.st_ino) << name;
    EXPECT_EQ(num_files(), 2) << name;
    std::filesystem::remove(path());
  }
  write_safetensors(path(), file_);
  write_safetensors(path(), file_);
  EXPECT_EQ(read_safetensors(path()).tensors.size(), 1u);
}

TEST_F(RegularFile, IsStillOneWhenItIsReplaced) {
  engine::DurableFile file(path());
  std::filesystem::create_symlink("victim", path());
  EXPECT_TRUE(contains(message_of<c10::ValueError>([&] { file.commit(); }), "got a symbolic link"));
  EXPECT_TRUE(std::filesystem::is_symlink(path()));
}

TEST_F(RegularFile, KeepsItsPermissionsWhenItIsReplaced) {
  for (const mode_t mode : {0600, 0640}) {
    engine::DurableFile(path()).commit();
    ASSERT_EQ(::chmod(path().c_str(), mode), 0);
    engine::DurableFile(path()).commit();
    struct stat status{};
    ASSERT_EQ(::stat(path().c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, mode);
  }
}

TEST_F(RegularFile, IsWrittenUnderANameThatNobodyForesees) {
  std::filesystem::create_symlink("victim", path() + ".writing");  // what the name once was
  const mode_t mask = umask(027);
  {
    const engine::DurableFile first(path()), second(path());
    EXPECT_EQ(num_files(), 4);
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path())) {
      const std::string name = entry.path().filename();
      if (name == "victim" || name == "a.safetensors.writing") continue;
      EXPECT_TRUE(entry.symlink_status().type() == std::filesystem::file_type::regular) << name;
      EXPECT_EQ(entry.status().permissions(), std::filesystem::perms(0640)) << name;
    }
  }
  umask(mask);
  EXPECT_EQ(num_files(), 2);
  write_safetensors(path(), file_);
  EXPECT_EQ(num_files(), 3);
}

TEST_F(RegularFile, IsAllThatIsRead) {
  for (const auto& [name, make] : kObstacles) {
    if (name == "a symbolic link" || name == "a file of user 12345" || !make(path())) continue;
    const std::string text = message_of([&] { read_safetensors(path()); });  // and does not block
    EXPECT_TRUE(contains(text, "expected a file that can be read, got '" + path() + "': it is " + name)) << text;
    std::filesystem::remove(path());
  }
  write_safetensors(path(), file_);
  std::filesystem::create_symlink("a.safetensors", folder_.path("link"));
  EXPECT_EQ(read_safetensors(folder_.path("link")).tensors.size(), 1u);
}

}  // namespace
}  // namespace smp
