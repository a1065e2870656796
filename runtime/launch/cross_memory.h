// Whether processes of one host may read each other's memory.
#pragma once

namespace smp::runtime {

/// Tries whether one process may read the memory of another that is not its child (process_vm_readv, Linux). The kernel's
/// ptrace scope, and the seccomp filter or the namespaces of a container, may forbid it. Forks twice; the children do nothing
/// else.
bool may_read_other_processes();

}  // namespace smp::runtime
