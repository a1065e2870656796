// Owns the errors of the world outside: a peer, the network or time failed. Mistakes of a caller are c10::Error.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "runtime/watch/exit_code.h"

namespace smp {

/// Communication failed or took too long. what() says which operation, with which peer, in which
/// action, after how many seconds, and why. Ranks are world ranks, also inside a group.
class CommError : public std::runtime_error {
 public:
  /// What was going on.
  struct Where {
    std::string operation = {};  ///< "receive of 4096 bytes with tag 7", "barrier"
    int peer = -1;               ///< world rank; -1: a collective, or no peer in particular
    std::string action = {};     ///< the schedule's action, "2F0"; empty outside a schedule
    double seconds = 0;          ///< time spent waiting

    std::string text() const;
  };
  CommError(const Where& where, const std::string& reason);
  explicit CommError(const std::string& reason);
  ~CommError() override;
};

/// A wait took too long. what() is one line; lines() say what each rank was doing, and where those are that do not answer.
class HangError : public CommError, public HasExitCode {
 public:
  /// lines: of each rank, by world rank.
  HangError(const std::string& cause, std::vector<std::string> lines);
  ~HangError() override;

  const std::vector<std::string>& lines() const noexcept { return lines_; }

 private:
  std::vector<std::string> lines_;
};

/// Another rank failed and ended the job; that rank itself reports the cause.
class AbortedError : public CommError {
 public:
  /// message: what() of the root cause, as the failed rank gave it to Transport::abort.
  AbortedError(int failed_rank, const std::string& message);
  ~AbortedError() override;

  int failed_rank() const noexcept { return failed_rank_; }

 private:
  int failed_rank_;
};

/// The process of another rank is gone without a word: killed, crashed or left without shutdown.
class PeerLostError : public CommError {
 public:
  /// description: "rank 2 (pid 123 on host x) was killed …"
  explicit PeerLostError(const std::string& description);
  ~PeerLostError() override;
};

}  // namespace smp
