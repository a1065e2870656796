// Memory of messages that nobody waits for any more.
#pragma once

#include <memory>

namespace smp::runtime {

/// Keeps `buffer` until the process ends. For messages under way when an exception ends a step: they cannot be taken
/// back, and the transport may write to their memory at any later time.
void abandon(std::shared_ptr<const void> buffer);

}  // namespace smp::runtime
