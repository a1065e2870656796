// Owns which launcher started this process, and what it says about ranks. Starts nothing.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace smp::runtime {

/// How this process came to be one of several, or not.
struct Launch {
  enum class Kind {
    kSingleProcess,  ///< no launcher: a world of one
    kMpirun,         ///< Open MPI's mpirun
    kSrun,           ///< Slurm's srun, where MPI meets over PMIx
    kTorchrun,       ///< torchrun, or who sets its variables
  };
  /// Where the processes that torchrun starts meet.
  struct Store {
    std::string host{};
    int port = 0;
    bool is_kept_by_launcher = false;  ///< otherwise by rank 0
    bool operator==(const Store&) const = default;
  };
  Kind kind = Kind::kSingleProcess;
  int rank = 0;
  int size = 1;
  int local_rank = 0;  ///< among the ranks of this host
  int local_size = 1;
  Store store{};  ///< of kTorchrun

  bool has_mpi() const { return kind == Kind::kMpirun || kind == Kind::kSrun; }
  bool has_others() const { return kind != Kind::kSingleProcess; }
  bool operator==(const Launch&) const = default;
};

/// The value of an environment variable, if it is set.
using EnvironmentLookup = std::function<std::optional<std::string>(const char* name)>;

/// Looks in this process's environment.
std::optional<std::string> process_environment(const char* name);

/// Which launcher started this process.
///
/// Reads OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE (the local ones default to one host), and else torchrun's
/// RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and else, beside PMIX_RANK, those of a step
/// of srun. What MPI_Init leaves in a process that nobody has launched (mpi4py's import) counts as no launcher. Throws
/// c10::ValueError when the set is incomplete or no number, when the first two are there and disagree, and when another
/// launcher (srun without PMIx, MPICH, Intel MPI, MVAPICH) started several processes that would not find each other.
Launch detect_launch(const EnvironmentLookup& lookup = process_environment);

/// Empty where MPI has found what `launch` says, rank `rank` of `size`; else the complaint.
/// Variables that no mpirun has set would make every process a world of one.
std::string describe_mismatch(const Launch& launch, int rank, int size);

/// Sets, where neither the user nor `smp run` has, how Open MPI moves messages between processes of one host: in one go up
/// to 16 KB, larger ones in two copies, which no machine forbids; and that ranks which are all on one host open no port.
/// Call before MPI is initialised; later it has no effect.
void set_mpi_defaults(const Launch& launch);

}  // namespace smp::runtime
