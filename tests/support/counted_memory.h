// What a call asks of memory: operator new and LibTorch's CPU allocator, replaced in the program that links this.
#pragma once

#include <cstdint>
#include <functional>

namespace smp::support {

/// Bytes that `call` asks for, given back or not, on this thread. A request of more than 64 MiB counts, and throws
/// std::bad_alloc in place of taking so much.
int64_t bytes_asked_for(const std::function<void()>& call);

}  // namespace smp::support
