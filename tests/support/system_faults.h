// A process to which something happens at one of its system calls that change files. For programs, and for Python by ctypes.
#pragma once

#include <sys/types.h>

namespace smp::support {

constexpr int kKills = 0;  // in place of an error of the system's

struct Ended {
  bool has_come = false;  // as many calls as were asked for
  bool is_well = false;   // with 0
};

/// In a child process, before anything else: its parent sees its calls. Ends it with 1 where that is forbidden.
void let_parent_trace();

/// In its parent. When the child is about to make the call `number` that changes files, counted from 1 on all its threads
/// from the SIGUSR1 on that it sends to itself, the call returns `error`, or kKills kills the process. Throws
/// std::runtime_error where the child ends in another way. Errors on x86-64 only.
Ended trace_with_fault(pid_t child, int number, int error);

}  // namespace smp::support

extern "C" {
void smp_let_parent_trace();
/// Both of Ended as bits, has_come first; -1 where it throws.
int smp_trace_with_fault(int child, int number, int error);
}
