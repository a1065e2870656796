// A list that only grows, by the messages of a step that failed.
#include "runtime/transport/abandoned.h"

#include <mutex>
#include <vector>

namespace smp::runtime {

void abandon(std::shared_ptr<const void> buffer) {
  static std::mutex mutex;                                           // ranks may be threads of one process
  static auto* kept = new std::vector<std::shared_ptr<const void>>;  // outlives every transport
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(std::move(buffer));
}

}  // namespace smp::runtime
