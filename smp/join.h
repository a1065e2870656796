// Uneven input: replicas with fewer batches keep up with the others.
#pragma once

#include <functional>

#include "smp/options.h"

namespace smp {

/// Runs `loop`, which calls step functions as often as its replica has batches, and then takes part in the steps of the
/// replicas that have more, without data of its own. When all have finished, every replica takes over parameters, buffers
/// and the state and options of all DistributedOptimizers from the one with the most steps (of several the first), so that
/// replicas are equal again.
///
///   smp::join([&] {
///     for (auto& batch : *loader) {          // of another length on each replica
///       optimizer.zero_grad();
///       train_step(batch.data, batch.target);
///       optimizer.step();
///     }
///   });
///
/// All ranks of one pipeline have the same number of batches. Every replica needs one for the step that places a model.
/// Within the loop what all replicas do together is refused (collectives over other groups than the pipeline,
/// load_state_dict, save_state): the others may have left it. Learning-rate schedulers are the program's: step them by
/// epoch, outside.
///
/// Collective over all ranks. An exception that leaves the loop ends the job, because the others wait; that of
/// throw_on_early_termination leaves the join on all of them instead. Throws
/// c10::ValueError, on every rank alike and before the loop, for options that differ, for parallelism=auto (replicas share
/// their batches), for a communication hook with divide_by_initial_world_size = false, and for optimizers whose state is not
/// known (see DistributedOptimizer::state_dict); inside a step body or another join.
void join(const std::function<void()>& loop, const JoinOptions& options = {});

}  // namespace smp
