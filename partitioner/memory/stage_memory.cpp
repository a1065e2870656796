// A forward and a backward, performed on sizes only.
#include "partitioner/memory/stage_memory.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/cost/operator_table.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/memory/gradient_memory.h"
#include "partitioner/memory/stage_uses.h"

namespace smp::partitioner {
namespace {

// The copy of the generator's state from which the user's random numbers are restored after a forward that draws some.
constexpr int64_t kGeneratorStateBytes = 5056;

// Numbers that become tensors on their way into a kernel.
constexpr int64_t kScalarBytes = 64;

class StageWalk {
 public:
  StageWalk(const Graph& graph, StageUses uses, int64_t allocation_bytes)
      : graph_(graph), allocation_bytes_(allocation_bytes), uses_(std::move(uses)), blocks_(uses_.blocks) {}

  StageMemory run() {
    StageMemory memory;
    memory.forward = forward(memory.results);
    memory.saved = saved_bytes_;
    memory.written = written_bytes();
    memory.outputs = output_bytes();
    for (ValueId id : uses_.roles.received) {
      const int32_t storage = graph_.values[id].storage;
      if (storage < 0 || uses_.block_of[storage] == StageUses::kNone) continue;
      const StageUses::Block& block = blocks_[uses_.block_of[storage]];
      if (block.is_result) memory.returned_arrivals.insert(id);
      if (block.is_held) memory.saved_arrivals.insert(id);
    }
    if (!graph_.has_backward()) return memory;
    memory.first_backward = backward(/*is_first=*/true);
    memory.later_backward = backward(/*is_first=*/false);
    memory.only_backward = memory.first_backward;
    memory.last_backward = memory.later_backward;
    if (uses_.buckets.empty()) return memory;
    memory.only_backward = backward(/*is_first=*/true, /*is_last=*/true);
    memory.last_backward = backward(/*is_first=*/false, /*is_last=*/true);
    memory.under_way = uses_.buckets.back().under_way_bytes();
    memory.arriving = uses_.buckets.back().largest;
    return memory;
  }

 private:
  int64_t written_bytes() const {
    std::set<int32_t> storages;
    for (const StageUses::NodeUse& use : uses_.nodes) {
      storages.insert(use.node.written_storages.begin(), use.node.written_storages.end());
    }
    int64_t bytes = 0;
    for (int32_t storage : storages) {
      const bool is_received = uses_.block_of[storage] != StageUses::kNone && blocks_[uses_.block_of[storage]].is_received;
      if (is_received || uses_.is_permanent[storage]) bytes += uses_.extents[storage];
    }
    return bytes;
  }

  int64_t output_bytes() const {
    int64_t bytes = 0;
    for (const StageUses::Block& block : blocks_) {
      if (block.is_kept || block.is_root || block.is_result) bytes += uses_.bytes_of(block);
    }
    return bytes;
  }

  /// Leaves in `blocks_` what is saved. Returns the peak.
  int64_t forward(int64_t& result_bytes) {
    ByteMeter meter(0);
    std::vector<std::vector<StageUses::Block*>> dying(uses_.nodes.size());
    for (StageUses::Block& block : blocks_) dying[block.last_use].push_back(&block);
    const auto hold = [&](StageUses::Block& block) {
      if (!std::exchange(block.is_held, true)) meter.hold(uses_.bytes_of(block));
    };
    for (StageUses::Block& block : blocks_) {
      if (block.is_received) hold(block);
    }
    for (size_t k = 0; k < uses_.nodes.size(); ++k) {
      const StageUses::NodeUse& use = uses_.nodes[k];
      const auto& [node, row, saved] = std::tie(use.node, use.row, use.saved);
      if (use.run != StageUses::kNone && uses_.runs[use.run].begin == k) {
        for (int32_t block : uses_.runs[use.run].held) ++blocks_[block].num_savers;
      }
      for (ValueId id : node.outputs) {
        if (id != kNoValue && graph_.values[id].storage >= 0) hold(blocks_[uses_.block_of[graph_.values[id].storage]]);
      }
      meter.touch(kScalarBytes + cast_bytes(graph_, node) + (row.workspace_bytes ? row.workspace_bytes(graph_, node) : 0));
      meter.hold(use.extra_saved_bytes);
      for (int32_t block : saved) ++blocks_[block].num_savers;
      for (StageUses::Block* block : dying[k]) {
        let_die(*block, meter);
      }
      if (node_is_last_of_run(k)) forget(uses_.runs[uses_.nodes[k].run], meter);
    }
    const bool draws = std::any_of(uses_.nodes.begin(), uses_.nodes.end(),
                                   [](const StageUses::NodeUse& use) { return use.node.random_ordinal >= 0; });
    if (draws) meter.touch(kGeneratorStateBytes);
    for (StageUses::Block& block : blocks_) {
      if (!block.is_held) continue;
      const bool stays = block.num_savers > 0 || block.is_root;
      if (block.is_result) result_bytes += uses_.bytes_of(block);
      if (!stays) block.is_held = false;
      if (!stays || block.is_result) meter.drop(uses_.bytes_of(block));
    }
    saved_bytes_ = meter.now();
    return meter.peak();
  }

  bool node_is_last_of_run(size_t k) const {
    return uses_.nodes[k].run != StageUses::kNone && uses_.runs[uses_.nodes[k].run].end == k + 1;
  }

  void let_die(StageUses::Block& block, ByteMeter& meter) const {
    if (block.num_savers > 0 || block.is_kept || block.is_root || block.is_result) return;
    if (std::exchange(block.is_held, false)) meter.drop(uses_.bytes_of(block));
  }

  /// What the forward of a run has saved goes; what it finds when it runs again stays.
  void forget(const StageUses::Run& run, ByteMeter& meter) {
    for (size_t k = run.begin; k < run.end; ++k) {
      if (uses_.nodes[k].is_again) meter.drop(uses_.nodes[k].extra_saved_bytes);
      for (int32_t block : uses_.nodes[k].saved) blocks_[block].num_savers -= uses_.is_made_again_in(run, blocks_[block]);
    }
    for (const std::vector<int32_t>& dying : run.dying) {
      for (int32_t block : dying) {
        if (blocks_[block].last_use < run.end) let_die(blocks_[block], meter);
      }
    }
  }

  /// The forward of a run before its backward. What it makes a second time for others dies with it.
  void run_again(const StageUses::Run& run, std::vector<StageUses::Block>& blocks, ByteMeter& meter) const {
    std::set<int32_t> made;
    for (size_t k = run.begin; k < run.end; ++k) {
      const StageUses::NodeUse& use = uses_.nodes[k];
      for (ValueId id : use.node.outputs) {
        if (id == kNoValue || graph_.values[id].storage < 0) continue;
        const int32_t block = uses_.block_of[graph_.values[id].storage];
        const bool is_new = use.is_again && uses_.is_made_again_in(run, blocks[block]) && made.insert(block).second;
        if (is_new) meter.hold(uses_.bytes_of(blocks[block]));
      }
      for (int32_t block : use.saved) blocks[block].num_savers += uses_.is_made_again_in(run, blocks[block]);
      if (use.is_again) {
        meter.touch(kScalarBytes + cast_bytes(graph_, use.node) +
                    (use.row.workspace_bytes ? use.row.workspace_bytes(graph_, use.node) : 0));
        meter.hold(use.extra_saved_bytes);
      }
      for (int32_t block : run.dying[k - run.begin]) {
        const bool is_held = run.held.contains(block);
        if (is_held) --blocks[block].num_savers;
        const bool may_die = is_held || uses_.is_made_again_in(run, blocks[block]);
        if (may_die && blocks[block].num_savers == 0) meter.drop(uses_.bytes_of(blocks[block]));
      }
    }
  }

  int64_t backward(bool is_first, bool is_last = false) {
    LeavingGradients leaving;
    if (is_last) leaving.buckets = uses_.buckets;
    ByteMeter meter(saved_bytes_);
    std::vector<StageUses::Block> blocks = blocks_;
    GradientMemory gradients(graph_, allocation_bytes_);
    for (ValueId id : uses_.roles.roots) gradients.enter(id, meter);
    for (const StageUses::Block& block : blocks) {
      if (block.is_root && block.num_savers == 0) drop(block, meter);
    }
    for (size_t k = uses_.nodes.size(); k-- > 0;) {
      if (node_is_last_of_run(k)) run_again(uses_.runs[uses_.nodes[k].run], blocks, meter);
      step_back(k, is_first, blocks, gradients, leaving, meter);
    }
    while (leaving.next < leaving.buckets.size()) leaving.leave(meter);
    leaving.arrive(meter);
    return meter.peak();
  }

  void step_back(size_t k, bool is_first, std::vector<StageUses::Block>& blocks, GradientMemory& gradients,
                 LeavingGradients& leaving, ByteMeter& meter) {
    if (!uses_.nodes[k].has_backward) return;
    const StageUses::NodeUse& use = uses_.nodes[k];
    const auto& [node, row, inputs, saved] = std::tie(use.node, use.row, use.inputs, use.saved);
    const ValueId* output = nullptr;  // the first with a gradient
    for (const ValueId& id : node.outputs) {
      if (output == nullptr && id != kNoValue && gradients.is_there(id)) output = &id;
    }
    if (output == nullptr) return;  // no gradient comes here
    for (ValueId id : inputs) {
      if (!graph_.values[id].spec.requires_grad) continue;
      gradients.pass(node, row, id, *output, meter);
    }
    meter.touch(backward_workspace(node, row, *output));
    for (ValueId id : node.outputs) {
      if (id != kNoValue) gradients.forget(id, meter);
    }
    for (ValueId id : inputs) {
      if (uses_.first_use[id] == static_cast<int32_t>(k)) leaving.note_final(id, meter);
    }
    for (ValueId id : inputs) {
      const bool is_parameter = graph_.values[id].kind == ValueKind::kParameter;
      if (is_first || !is_parameter || uses_.first_use[id] != static_cast<int32_t>(k)) continue;  // made here, or not whole
      gradients.forget(id, meter);
    }
    meter.drop(use.extra_saved_bytes);
    for (int32_t block : saved) {
      if (--blocks[block].num_savers == 0) drop(blocks[block], meter);
    }
  }

  void drop(const StageUses::Block& block, ByteMeter& meter) const {
    if (!block.is_result) meter.drop(uses_.bytes_of(block));
  }

  /// A product of more than two dimensions folds its gradient, too, into a copy if that comes through a transpose.
  int64_t backward_workspace(const Node& node, const OperatorRow& row, ValueId output) const {
    const TensorSpec& spec = graph_.values[output].spec;
    const bool folds = row.is_product && spec.sizes.size() > 2;
    const int32_t storage = graph_.values[output].storage;
    const bool is_turned =
        storage >= 0 && uses_.block_of[storage] != StageUses::kNone && blocks_[uses_.block_of[storage]].is_turned;
    const int64_t copy = folds && is_turned ? spec.num_bytes() : 0;
    return kScalarBytes + copy + cast_bytes(graph_, node) +
           (row.backward_workspace_bytes ? row.backward_workspace_bytes(graph_, node) : 0);
  }

  const Graph& graph_;
  const int64_t allocation_bytes_;
  const StageUses uses_;
  std::vector<StageUses::Block> blocks_;
  int64_t saved_bytes_ = 0;
};

}  // namespace

StageMemory stage_memory(const Graph& graph, const GradientFlow& flow, const Plan& plan, int stage, int64_t bucket_bytes,
                         bool buckets_are_shared, int64_t allocation_bytes, const Remade* found) {
  const Remade own = found == nullptr ? remade_of(graph, flow, plan) : Remade();
  const Remade& remade = found == nullptr ? own : *found;
  const auto walk = [&](RunsAgain runs_again) {
    StageUses uses(graph, flow, plan, stage, {bucket_bytes, buckets_are_shared}, allocation_bytes, remade, runs_again);
    return StageWalk(graph, std::move(uses), allocation_bytes).run();
  };
  StageMemory memory = walk(RunsAgain::kWhatIsNotKept);
  if (plan.recomputation.is_empty()) return memory;
  const StageMemory first_steps = walk(RunsAgain::kAll);
  for (const auto peak : {&StageMemory::forward, &StageMemory::first_backward, &StageMemory::later_backward,
                          &StageMemory::only_backward, &StageMemory::last_backward}) {
    memory.*peak = std::max(memory.*peak, first_steps.*peak);
  }
  return memory;
}

}  // namespace smp::partitioner
