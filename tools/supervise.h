// Owns the life of a started mpirun: signals on to it, an end for it, and nothing left behind it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <vector>

namespace smp::tools {

/// The program could not be executed.
struct NotStarted : std::system_error {
  using std::system_error::system_error;
};

class Signals;

/// Runs `arguments` (a program of PATH and what it gets) and returns its exit code, 128 + the number of the signal that
/// ended it. Throws NotStarted.
///
/// SIGTERM and SIGHUP ask for a stop: they arrive as SIGUSR1, which mpirun hands to its ranks, so that a program that looks
/// at smp::stop_requested() ends its step and saves. Who has not ended after `grace`, or at the second signal, gets SIGTERM,
/// and 5 s later SIGKILL, with all it has started. SIGINT, SIGUSR1 and SIGUSR2 go on as they are. The program is a process
/// group of its own, unless a terminal is its standard input: then what that sends reaches both. When this process is
/// killed, the program gets a SIGTERM.
///
/// A program all of whose children have ended, and that has not fetched the status of one for `stuck_limit`, gets SIGKILL:
/// mpirun of Open MPI 4.1 stays for ever where a rank ends while it makes its connection to it.
///
/// What the program leaves behind is ended and removed: processes; where mpirun was killed, its session folder and the
/// shared memory of its ranks.
///
/// Once it is made, also between two programs and behind the last, none of these signals ends this process.
class Supervisor {
 public:
  explicit Supervisor(std::chrono::seconds grace, std::chrono::milliseconds stuck_limit = std::chrono::seconds(30));
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  int run(const std::vector<std::string>& arguments);
  /// Has somebody asked for a stop, so far?
  bool is_stopping();

 private:
  void end_those_left() const;
  bool is_stuck(pid_t program) const;

  std::unique_ptr<const Signals> signals_;
  std::chrono::seconds grace_;
  std::chrono::milliseconds stuck_limit_;
  std::set<pid_t> not_of_the_job_;  // children that this process had before
  bool is_stopping_ = false;
};

}  // namespace smp::tools
