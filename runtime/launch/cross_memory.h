// Whether processes of one host may read each other's memory.
#pragma once

namespace smp::runtime {

/// Tries whether one process is forbidden to read the memory of another that is not its child (process_vm_readv, Linux), as it
/// is by the seccomp filters of some containers. false also where the trial itself fails: ranks that share a host are to come to
/// one answer. Forks twice; the children do nothing else, and do not outlive this process.
bool is_cross_memory_forbidden();

}  // namespace smp::runtime
