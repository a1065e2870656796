// Messages of a length that the receiver does not know, handed over: the receiver is known to take them.
#pragma once

#include <string>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Gives `bytes` to each of `dests`, which have told that they call take_over (calls.h). operation: for error texts. Throws
/// CommError.
void hand_over(Transport& transport, const std::vector<int>& dests, const std::string& bytes, const std::string& operation);
/// The next bytes that `source` hands over to this rank.
std::string take_over(Transport& transport, int source, const std::string& operation);

}  // namespace smp::runtime
