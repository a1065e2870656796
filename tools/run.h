// Owns `smp run`: the command line that starts a program under Open MPI's mpirun.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace smp::tools {

struct RunOptions {
  int num_processes = 1;
  int timeout_s = 0;  // 0: no limit
  bool dry_run = false;
  std::vector<std::string> program;  // path and arguments, passed on untouched
};

struct Machine {
  bool is_root = false;
  int num_cores = 1;                 // physical cores that this process may use, as Open MPI counts its slots
  bool allows_cross_memory = false;  // a process may read the memory of another that is not its child
};

/// The machine and user that this process runs on.
Machine this_machine();

struct Launch {
  /// Variables for mpirun and the ranks. `if_unset`: a value that the user has set wins.
  struct Variable {
    std::string name;
    std::string value;
    bool if_unset = false;
  };
  std::vector<Variable> environment;
  std::vector<std::string> arguments;  // arguments[0] is "mpirun"

  /// The launch as one line for a POSIX shell, with quotes where they are needed.
  std::string shell_line() const;
};

/// What `smp run` executes on `machine`.
Launch plan_launch(const RunOptions& options, const Machine& machine);

/// Prints the launch to stderr and becomes mpirun. Returns only after a dry run (0) or when mpirun
/// cannot be started (2, with the reason on stderr).
int run(const RunOptions& options);

}  // namespace smp::tools
