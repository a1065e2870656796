// Memory of messages that nobody waits for any more.
#pragma once

#include <memory>

namespace smp::runtime {

/// Keeps `buffer` until the process ends. For messages under way when an exception ends a step: they cannot be taken
/// back, and the transport may write to their memory at any later time.
void abandon(std::shared_ptr<const void> buffer);

/// What `communicate` returns; whatever it throws, `buffer` is abandoned.
template <class Communicate>
auto keeping(const std::shared_ptr<const void>& buffer, const Communicate& communicate) {
  try {
    return communicate();
  } catch (...) {
    abandon(buffer);
    throw;
  }
}

}  // namespace smp::runtime
