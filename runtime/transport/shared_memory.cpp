// Blocks have names only until all ranks have found them.
#include "runtime/transport/shared_memory.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <iomanip>
#include <optional>
#include <random>
#include <sstream>
#include <string>

namespace smp::runtime {
namespace {

namespace ipc = boost::interprocess;

// Unpredictable, so that one that can be opened is the one that was meant.
std::string new_name() {
  std::random_device random;
  std::ostringstream name;
  name << "smp-" << std::hex << std::setfill('0');
  for (int i = 0; i < 4; ++i) name << std::setw(8) << random();
  return name.str();
}

class NamedBlock {
 public:
  explicit NamedBlock(int64_t num_bytes) {
    try {
      ipc::shared_memory_object block(ipc::create_only, name_.c_str(), ipc::read_write, ipc::permissions(0600));
      exists_ = true;
      // Reserved: a page that is missing later would end the process with SIGBUS.
      int error = 0;
      do error = posix_fallocate(block.get_mapping_handle().handle, 0, num_bytes);
      while (error == EINTR);
      is_whole_ = error == 0;
    } catch (const ipc::interprocess_exception&) {  // NOLINT(bugprone-empty-catch): then there is none, as name() says
    }
  }
  ~NamedBlock() {
    if (exists_) ipc::shared_memory_object::remove(name_.c_str());
  }
  NamedBlock(const NamedBlock&) = delete;
  NamedBlock& operator=(const NamedBlock&) = delete;

  /// Empty where there is none.
  std::string name() const { return is_whole_ ? name_ : ""; }

 private:
  std::string name_ = new_name();
  bool exists_ = false, is_whole_ = false;
};

std::optional<ipc::mapped_region> mapped(const std::string& name, int64_t num_bytes) {
  if (name.empty()) return std::nullopt;
  try {
    const ipc::shared_memory_object block(ipc::open_only, name.c_str(), ipc::read_write);
    return ipc::mapped_region(block, ipc::read_write, 0, static_cast<size_t>(num_bytes));
  } catch (const ipc::interprocess_exception&) {
    return std::nullopt;
  }
}

}  // namespace

std::unique_ptr<SharedMemory> SharedMemory::make(Transport& group, int64_t num_bytes) {
  const NamedBlock own(num_bytes);
  std::unique_ptr<SharedMemory> made(new SharedMemory);
  made->num_bytes_ = num_bytes;
  for (const std::string& name : group.all_gather(own.name())) {
    std::optional<ipc::mapped_region> block = mapped(name, num_bytes);
    if (block) made->blocks_.push_back(std::move(*block));
  }
  const bool has_all = static_cast<int>(made->blocks_.size()) == group.size();
  const std::vector<std::string> answers = group.all_gather(has_all ? "all" : "");
  return std::count(answers.begin(), answers.end(), "all") == group.size() ? std::move(made) : nullptr;
}

}  // namespace smp::runtime
