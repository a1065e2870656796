// Start and end of a job, and who this process is in it.
#pragma once

#include <vector>

#include "smp/config.h"

namespace smp {

/// Joins the job that the launcher started (mpirun, or none: a world of one) and fixes the configuration. First call of
/// every program, on every rank; collective. Rank 0 prints the configuration.
///
///   smp::init({.microbatches = 4});
///
/// `argument` is overridden key by key by SMP_CONFIG and SM_HP_MP_PARAMETERS (docs/configuration.md).
/// Throws c10::ValueError, on every rank and before anything else happens, for a configuration with errors (all of them at
/// once), one that differs between ranks (with the keys), or a world it does not fit.
///
/// A second call takes over the keys that it names (fields other than their default) and that have had no effect yet: most
/// are read when the first model is made. It throws c10::ValueError for the others that it would change.
void init(const Config& argument = {});
/// Leaves the job; collective. Objects made with smp must not be used afterwards. Throws c10::ValueError inside a step body
/// and where optimizers differ between ranks, as a training step does; c10::Error before init.
void shutdown();
/// True from init to shutdown. Never throws.
bool is_initialized();

/// Has somebody asked for a stop? Collective, and the same answer on all ranks: ask between steps, then save and end with
/// kExitPreempted (docs/reliability.md). A SIGUSR1 to any rank asks, or one to `mpirun`, which hands it to all, or a SIGTERM
/// to `smp run`. Before the first call such a signal ends the job.
bool stop_requested();
/// Exit code of a job that has stopped as asked and is to be resumed (EX_TEMPFAIL).
constexpr int kExitPreempted = 75;

/// The configuration in force. This and everything below throws c10::Error before init.
const Config& config();

/// This process in the world and on its host.
int rank();
int size();
int local_rank();
int local_size();
/// Stage of my pipeline, 0 = first; pp_rank() 0 runs the step body.
int pp_rank();
int pp_size();
/// Replica. Replicas get different data: use dp_rank() of dp_size() for the sampler.
int dp_rank();
int dp_size();
/// Rank within one full replica of the model; the same as pp_rank() without tensor parallelism.
int mp_rank();
int mp_size();
/// Shard of my stage. Tensor parallelism does not exist yet (a tensor_parallel_degree above 1 is refused by init): rank 0
/// of 1.
int tp_rank();
int tp_size();
/// Rank among those that hold exactly my parameters; the same as dp_rank() without tensor parallelism.
int rdp_rank();
int rdp_size();

/// The ranks of my group as ranks of the world, ascending; a rank's place in the list is its rank in the group. Which
/// ranks are neighbours: Config::placement_strategy (docs/placement.md).
std::vector<int> get_world_group();
std::vector<int> get_mp_group();
std::vector<int> get_dp_group();
std::vector<int> get_pp_group();
std::vector<int> get_tp_group();
std::vector<int> get_rdp_group();

}  // namespace smp
