// Owns the wording of communication errors.
#include "runtime/transport/error.h"

#include <cstdio>
#include <utility>

namespace smp {

std::string CommError::Where::text() const {
  std::string text = operation;
  if (peer >= 0) text += ", peer rank " + std::to_string(peer);
  if (!action.empty()) text += ", action " + action;
  if (seconds > 0) {
    char waited[32];
    std::snprintf(waited, sizeof(waited), ", after %.1f s", seconds);
    text += waited;
  }
  return text;
}

CommError::CommError(const Where& where, const std::string& reason) : std::runtime_error(where.text() + ": " + reason) {}
CommError::CommError(const std::string& reason) : std::runtime_error(reason) {}
CommError::~CommError() = default;

HangError::HangError(const std::string& cause, std::vector<std::string> lines)
    : CommError(cause), HasExitCode(ExitCode::kHang), lines_(std::move(lines)) {}
HangError::~HangError() = default;

AbortedError::AbortedError(int failed_rank, const std::string& message)
    : CommError("rank " + std::to_string(failed_rank) + " failed: " + message), failed_rank_(failed_rank) {}
AbortedError::~AbortedError() = default;

PeerLostError::PeerLostError(const std::string& description) : CommError(description) {}
PeerLostError::~PeerLostError() = default;

}  // namespace smp
