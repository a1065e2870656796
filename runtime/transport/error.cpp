// Owns the wording of communication errors.
#include "runtime/transport/error.h"

#include <cstdio>

namespace smp {
namespace {

std::string text_of(const CommError::Where& where, const std::string& reason) {
  std::string text = where.operation;
  if (where.peer >= 0) text += ", peer rank " + std::to_string(where.peer);
  if (!where.action.empty()) text += ", action " + where.action;
  if (where.seconds > 0) {
    char seconds[32];
    std::snprintf(seconds, sizeof(seconds), ", after %.1f s", where.seconds);
    text += seconds;
  }
  return text + ": " + reason;
}

}  // namespace

CommError::CommError(const Where& where, const std::string& reason) : std::runtime_error(text_of(where, reason)) {}
CommError::CommError(const std::string& reason) : std::runtime_error(reason) {}
CommError::~CommError() = default;

AbortedError::AbortedError(int failed_rank, const std::string& message)
    : CommError("rank " + std::to_string(failed_rank) + " failed: " + message), failed_rank_(failed_rank) {}
AbortedError::~AbortedError() = default;

PeerLostError::PeerLostError(const std::string& description) : CommError(description) {}
PeerLostError::~PeerLostError() = default;

}  // namespace smp
