// Placement by hand.
#pragma once

#include <memory>

namespace torch::nn {
class Module;
}

namespace smp {

/// Modules created while a guard lives go to that stage; the innermost guard wins. Modules are recognised by their
/// parameters and buffers, so those without any follow their neighbours.
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() {
///       { smp::PartitionGuard on_stage(0); first = register_module("first", torch::nn::Linear(8, 8)); }
///       { smp::PartitionGuard on_stage(1); second = register_module("second", torch::nn::Linear(8, 8)); }
///     }
///   };
///
/// With Config::auto_partition = true the rest is placed by the planner, with false it goes to Config::default_partition.
class PartitionGuard {
 public:
  /// Throws c10::ValueError unless 0 <= stage < pp_size(), and inside a step body; c10::Error
  /// before init. A step throws c10::ValueError while a guard lives.
  explicit PartitionGuard(int stage);
  ~PartitionGuard();
  PartitionGuard(const PartitionGuard&) = delete;
  PartitionGuard& operator=(const PartitionGuard&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Places an existing module with everything below it; overrides guards. Before the first step. Converting the module
/// afterwards (to(dtype)) is fine; a copy of it (clone()) is placed by itself. Throws c10::ValueError unless 0 <= stage <
/// pp_size(), and inside a step body; c10::Error when the model is already partitioned.
void set_partition(const torch::nn::Module& module, int stage);

}  // namespace smp
