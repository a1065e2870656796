// Recognising the tensors of modules that are placed by hand.
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>

#include <atomic>
#include <memory>
#include <utility>

#include "runtime/capture/interceptor.h"
#include "smp/engine/engine.h"
#include "smp/engine/rank/rank_state.h"
#include "smp/partition.h"

namespace smp {
namespace {

using By = engine::ManualPlacement::By;

int checked_stage(const char* caller, int stage) {
  const int stages = engine::context(caller).pipeline->size();
  TORCH_CHECK_VALUE(stage >= 0 && stage < stages, caller, ": expected a stage in [0, ", stages,
                    ") (pipeline_parallel_degree), got ", stage,
                    ". Stages count from 0; use smp::pp_size() or raise the degree.");
  return stage;
}

// Notes the memory of every tensor that is made while the guard lives and no other in it; parameters keep that memory.
struct Creations : runtime::Interceptor {
  Creations(engine::ManualPlacement& manual_placement, int guarded_stage)
      : placement(manual_placement), stage(guarded_stage) {}
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    const size_t below = stack.size() - op.schema().arguments().size();
    const bool is_innermost = !std::exchange(is_asked_within, true);
    const auto end = c10::make_scope_exit([&] { is_asked_within = !is_innermost; });
    runtime::pass_on(*this, op, stack);
    for (size_t i = below; is_innermost && i < stack.size(); ++i) {
      if (stack[i].isTensor()) placement.place(stack[i].toTensor(), stage, By::kGuard);
    }
  }
  static thread_local bool is_asked_within;  // the innermost guard is asked first, and passes the call on
  engine::ManualPlacement& placement;
  int stage;
};
thread_local bool Creations::is_asked_within = false;

}  // namespace

struct PartitionGuard::State {
  State(std::shared_ptr<std::atomic<int>> guards, engine::ManualPlacement& placement, int stage)
      : open_guards(std::move(guards)), creations(placement, stage), scope(creations) {
    ++*open_guards;
  }
  ~State() { --*open_guards; }
  std::shared_ptr<std::atomic<int>> open_guards;  // may outlive smp
  Creations creations;
  runtime::InterceptScope scope;
};

PartitionGuard::PartitionGuard(int stage) {
  const int checked = checked_stage("PartitionGuard", stage);
  // Here it would take the operators away from the recording.
  engine::refuse_in_body("PartitionGuard", "Make the guard and the modules in the constructor of the parent module.");
  auto& own = engine::context("PartitionGuard");
  state_ = std::make_unique<State>(own.manual_placement.open_guards(), own.manual_placement, checked);
}

PartitionGuard::~PartitionGuard() = default;

void engine::set_partition(const std::vector<at::Tensor>& tensors, int stage) {
  checked_stage("set_partition", stage);
  refuse_in_body("set_partition");
  Context& own = context("set_partition");
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK(own.rank_state == nullptr || !own.rank_state->models.is_placed(tensor),
                "set_partition: expected a call before the first step, got one after the model was partitioned. Call it "
                "between the making of the module and the first step.");
  }
  for (const at::Tensor& tensor : tensors) own.manual_placement.place(tensor, stage, By::kSetPartition);
}

}  // namespace smp
