// Messages of a length that the receiver does not know, handed over: the sender waits for the receivers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// Gives `bytes` to each of `dests`, in whatever order they take them. hear(dest) waits until `dest` has told that it calls
/// take_over (calls.h). operation: for error texts. Throws CommError, and what hear() throws.
void hand_over(Transport& transport, const std::vector<int>& dests, const std::string& bytes, const std::string& operation,
               const std::function<void(int dest)>& hear);
/// The next bytes that `source` hands over to this rank.
std::string take_over(Transport& transport, int source, const std::string& operation);

}  // namespace smp::runtime
