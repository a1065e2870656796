// The receiver's side of Transport::send_bytes.
#pragma once

#include <string>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// The next bytes of a length that `source` sends before them. No more memory than one part beyond what has arrived is taken
/// for a length that is wrong. action: for error texts. Throws CommError, also for parts of other lengths.
std::string receive_long(Transport& transport, int source, int tag, int64_t part_bytes, const std::string& action);

}  // namespace smp::runtime
