// Owns what SIGTERM and SIGUSR1 mean while this process is one of several: look who died, instead of dying mutely; and stop
// at leisure, where the program looks.
#pragma once

namespace smp::runtime {

/// While one exists, a SIGTERM is noted (and handed to the handler that was there before) but does not end the process:
/// mpirun sends it to the survivors as soon as one rank has died, and SIGKILL 0.9 s later, which is the time they have to
/// say who died. Signal handlers are the process's, so there is one state for all objects. A SIGTERM that nobody has asked
/// for is raised again by the last destructor. A SIGUSR1 that nobody handles counts as a SIGTERM, until
/// expect_stop_signals().
class TerminationWatch {
 public:
  TerminationWatch();
  ~TerminationWatch();
  TerminationWatch(const TerminationWatch&) = delete;
  TerminationWatch& operator=(const TerminationWatch&) = delete;
};

/// Has a SIGTERM come since the first TerminationWatch was made?
bool is_termination_requested() noexcept;
/// The request has been answered, by an error that ends this process: forget it.
void acknowledge_termination() noexcept;

/// From now on, and as long as the process lives, a SIGUSR1 (mpirun hands it on to all ranks) asks for a stop and does
/// nothing else, but for the handler that was there before.
void expect_stop_signals();
/// Has one come since then?
bool is_stop_signalled() noexcept;

}  // namespace smp::runtime
