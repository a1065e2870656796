// Owns what can be seen of the processes of the other ranks of this host: whether they are alive, and where they are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/watch/stack.h"

namespace smp::runtime {

/// What tells a process from all others, also after its pid has been used again.
struct ProcessIdentity {
  std::string host;
  std::string boot;           ///< of the kernel; hosts may have the same name
  std::string pid_namespace;  ///< pids of another one mean nothing here
  int64_t pid = 0;
  int64_t start_ticks = 0;  ///< since the host started

  /// "pid 123 on host x"
  std::string text() const;
  std::string serialised() const;
  /// Throws c10::ValueError when `text` is not what serialised() gives.
  static ProcessIdentity parse(const std::string& text);
};

ProcessIdentity this_process();

/// Is it running? Unknown, and true, for a process of another host or pid namespace. A process that
/// has ended and waits for its parent (a zombie) is not running.
bool is_running(const ProcessIdentity& process);

/// The processes of a world.
class PeerProcesses {
 public:
  /// identities: serialised, by world rank.
  PeerProcesses(int my_rank, const std::vector<std::string>& identities);

  /// The lowest rank whose process is gone.
  std::optional<int> first_lost() const;
  /// As above, for the process of a rank.
  bool is_rank_running(int rank) const;
  /// "rank 2 (pid 123 on host x)"
  std::string name_of(int rank) const;
  /// And of its pids: only then can be told whether it runs.
  bool is_of_this_host(int rank) const;
  /// What can be seen of a rank that says nothing: "it is stopped".
  std::string seen_of(int rank) const;
  /// Have both their processes on one host, and one of its pids?
  bool are_of_one_host(int rank, int other) const;
  /// To a rank of this host, unless it is stopped or has ended.
  std::optional<StackQuestion> ask_for_stack(int rank) const;
  /// Is there still something of its process, if only what its parent has not yet fetched? As above where that is unknown.
  bool is_rank_there(int rank) const;

 private:
  std::vector<ProcessIdentity> processes_;
  std::vector<int> local_peers_;
};

}  // namespace smp::runtime
