// Owns `smp run`: the command line that starts a program under Open MPI's mpirun, and starts it again.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace smp::tools {

struct RunOptions {
  int num_processes = 1;
  int timeout_s = 0;  // 0: no limit
  int grace_s = 30;   // for a save, after a request to stop
  int max_restarts = 0;
  int min_processes = 0;    // a restart goes on with the hosts that answer, where they run as many; 0: with all
  std::string hosts{};      // "a:4,b:4"; empty: those of the allocation, or this one
  std::string host_file{};  // of mpirun's form, in their place
  std::string interface{};  // that hosts reach each other over: "eth0" or "10.0.0.0/16"; empty: any
  std::string log_dir{};    // empty: to this terminal alone
  bool tag_output = false;
  bool dry_run = false;
  std::vector<std::string> program;  // path and arguments, passed on untouched
};

struct Machine {
  bool is_root = false;
  int num_cores = 1;                 // physical cores that this process may use, as Open MPI counts its slots
  bool allows_cross_memory = false;  // a process may read the memory of another that is not its child
  bool has_other_hosts = false;      // mpirun finds several by itself: an allocation of a scheduler, or a file
};

/// How many processes the kernel has killed for want of memory, as /proc/vmstat counts them since the host started.
int64_t num_memory_kills(std::istream& vmstat);

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

/// Prints the launch to stderr, runs it under a Supervisor (tools/supervise.h) and returns its exit code; 2, with the reason
/// on stderr, when mpirun cannot be started. A job that fails is started again, up to max_restarts times, unless somebody
/// has asked for a stop or the command line or configuration was wrong (2). SMP_RESTART_COUNT says how often it was. With
/// min_processes a signal that comes between ends with 75, and a restart leaves out hosts that do not answer within 10 s
/// (tools/hosts.h), until they do at a later one.
int run(const RunOptions& options);

}  // namespace smp::tools
