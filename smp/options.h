// What models and joins are told when they are made.
#pragma once

#include <cstdint>
#include <string>

namespace smp {

/// What a DistributedModel is told when it is made; the same on every rank.
struct ModelOptions {
  /// Stands before the names of its tensors in plans and messages ("generator" makes "generator.fc.weight"). Empty: no
  /// name for the first model of a program, "model1", "model2", … for the others.
  std::string name{};
  /// Full buckets of gradients travel between replicas while the last backward goes on; false: at the end of the step. The
  /// same bits either way. Config::overlapping_allreduce = false turns it off for all models.
  bool overlapping_allreduce = true;
  /// Size of a bucket in MiB; 0: Config::bucket_cap_mb.
  int64_t bucket_cap_mb = 0;
  /// Gradients are those of the mean loss over microbatches; false: of their sum. The same for all models of a program.
  bool average_grads_across_microbatches = true;
  /// Replicas start every step with the buffers of dp_rank() 0. Config::broadcast_buffers = false turns it off for all.
  bool broadcast_buffers = true;
  /// Gradients are averaged over replicas in every n-th training step that makes gradients of the model; those between
  /// add up, without a division.
  int64_t backward_passes_per_step = 1;
};

/// How replicas that have run out of batches take part; the same on every rank.
struct JoinOptions {
  /// Gradients are sums over replicas, where one without a batch counts as zeros, divided by the number of all replicas:
  /// each batch has the same weight in all steps. false: divided by the number of those that still have batches.
  bool divide_by_initial_world_size = true;
  /// true: as soon as one replica runs out of batches, all throw c10::ValueError from this call or from the step.
  bool throw_on_early_termination = false;
};

}  // namespace smp
