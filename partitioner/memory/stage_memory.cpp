// A forward and a backward, performed on sizes only.
#include "partitioner/memory/stage_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/cost/operator_table.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/graph/recompute_regions.h"
#include "partitioner/graph/tensor_bytes.h"
#include "partitioner/memory/leaving_gradients.h"
#include "partitioner/plan/stage_roles.h"

namespace smp::partitioner {
namespace {

// The copy of the generator's state from which the user's random numbers are restored after a forward that draws some.
constexpr int64_t kGeneratorStateBytes = 5056;

// Numbers that become tensors on their way into a kernel.
constexpr int64_t kScalarBytes = 64;

constexpr int32_t kNone = -1;

class StageWalk {
 public:
  StageWalk(const Graph& graph, const GradientFlow& flow, const Plan& plan, int stage, int64_t bucket_bytes,
            bool buckets_are_shared, int64_t allocation_bytes)
      : graph_(graph),
        allocation_bytes_(allocation_bytes),
        roles_(stage_roles(graph, plan, stage)),
        extents_(storage_bytes(graph)),
        is_permanent_(permanent_storages(graph)),
        block_of_(extents_.size(), kNone),
        gradient_of_(graph.values.size(), kNone),
        first_use_(graph.values.size(), kNone) {
    const std::vector<NodeId>& nodes = plan.stages[stage].nodes;
    const std::vector<int32_t> regions = recomputed_with(graph);
    nodes_.reserve(nodes.size());
    for (size_t k = 0; k < nodes.size(); ++k) {
      const Node& node = graph.nodes[nodes[k]];
      NodeUse& use = nodes_.emplace_back(NodeUse{node, operator_row(node), node_inputs(node), {}});

      for (ValueId id : use.inputs) note_use(id, k);
      for (ValueId id : node.outputs) {
        note_use(id, k);
        note_turn(id);
        if (id == kNoValue || graph.values[id].storage < 0) continue;
        if (graph.values[id].producer == nodes[k]) block_at(graph.values[id].storage).is_own = true;
      }
      note_extent(use);
      use.has_backward = flow.passes_gradient(nodes[k]);
      if (!use.has_backward) continue;
      for (int32_t storage : saved_storages(graph, node, is_permanent_)) {
        block_at(storage);
        use.saved.push_back(block_of_[storage]);
      }
      use.extra_saved_bytes = allocated(extra_saved_bytes(graph, node));
    }
    find_runs(regions, nodes);
    for (int64_t& extent : extents_) extent = allocated(extent);
    if (bucket_bytes > 0) fill_buckets(plan, bucket_bytes);
    for (GradientBucket& bucket : buckets_) bucket.is_shared = buckets_are_shared;
  }

  StageMemory run() {
    StageMemory memory;
    memory.forward = forward(memory.results);
    memory.saved = saved_bytes_;
    memory.written = written_bytes();
    memory.outputs = output_bytes();
    for (ValueId id : roles_.received) {
      const int32_t storage = graph_.values[id].storage;
      if (storage < 0 || block_of_[storage] == kNone) continue;
      const Block& block = blocks_[block_of_[storage]];
      if (block.is_result) memory.returned_arrivals.insert(id);
      if (block.is_held) memory.saved_arrivals.insert(id);
    }
    if (!graph_.has_backward()) return memory;
    memory.first_backward = backward(/*is_first=*/true);
    memory.later_backward = backward(/*is_first=*/false);
    memory.only_backward = memory.first_backward;
    memory.last_backward = memory.later_backward;
    if (buckets_.empty()) return memory;
    memory.only_backward = backward(/*is_first=*/true, /*is_last=*/true);
    memory.last_backward = backward(/*is_first=*/false, /*is_last=*/true);
    memory.under_way = buckets_.back().under_way_bytes();
    memory.arriving = buckets_.back().largest;
    return memory;
  }

 private:
  int64_t allocated(int64_t bytes) const { return rounded_up(bytes, allocation_bytes_); }

  struct NodeUse {
    const Node& node;
    const OperatorRow& row;
    std::vector<ValueId> inputs;
    std::vector<int32_t> saved;  // blocks
    int64_t extra_saved_bytes = 0;
    bool has_backward = false;
    int32_t run = kNone;  // of those that are recomputed together
  };
  struct Block {
    int32_t storage;
    size_t first_use = 0, last_use = 0;
    bool is_used = false;
    bool is_own = false;  // made here; inputs of rank 0 are the step's
    bool is_received = false;
    bool is_turned = false;  // with a view whose dimensions are in another order
    bool is_kept = false;    // until the end of the forward
    bool is_root = false;    // until the backward begins
    bool is_result = false;  // until the step ends
    int num_savers = 0;      // operators whose backward is still to come, and regions that are still to run again
    bool is_held = false;
  };
  /// Operators that run again before their backward, by position.
  struct Run {
    size_t begin, end;
    std::vector<std::vector<int32_t>> dying{};  // by position from `begin`: blocks that nobody in the run uses behind it
  };
  struct Gradient {
    int64_t bytes = 0;
    int num_holders = 0;
  };

  void find_runs(const std::vector<int32_t>& regions, const std::vector<NodeId>& nodes) {
    for (size_t begin = 0, end; begin < nodes.size(); begin = end) {
      bool has_backward = false;
      for (end = begin; end < nodes.size() && regions[nodes[end]] == regions[nodes[begin]]; ++end) {
        has_backward = has_backward || nodes_[end].has_backward;
      }
      if (regions[nodes[begin]] != kKept && has_backward) add_run({.begin = begin, .end = end});
    }
  }

  void add_run(Run run) {
    std::map<int32_t, size_t> last_use;
    const auto note = [&](ValueId id, size_t k) {
      if (id != kNoValue && graph_.values[id].storage >= 0) last_use[block_of_[graph_.values[id].storage]] = k - run.begin;
    };
    for (size_t k = run.begin; k < run.end; ++k) {
      nodes_[k].run = static_cast<int32_t>(runs_.size());
      for (ValueId id : nodes_[k].inputs) note(id, k);
      for (ValueId id : nodes_[k].node.outputs) note(id, k);
    }
    run.dying.resize(run.end - run.begin);
    for (const auto& [block, last] : last_use) run.dying[last].push_back(block);
    runs_.push_back(std::move(run));
  }

  bool is_made_in(const Run& run, const Block& block) const {
    return block.is_own && !block.is_received && run.begin <= block.first_use && block.first_use < run.end;
  }

  void fill_buckets(const Plan& plan, int64_t bucket_bytes) {
    std::map<ValueId, std::set<int>> ranks;
    for (const StagePlan& other : plan.stages) {
      for (ValueId id : other.parameters) ranks[id].insert(other.rank);
    }
    std::vector<std::pair<int32_t, ValueId>> by_use;
    for (ValueId id = 0; id < static_cast<ValueId>(first_use_.size()); ++id) {
      if (first_use_[id] == kNone) continue;
      const Value& value = graph_.values[id];
      const bool is_parameter = value.kind == ValueKind::kParameter && value.spec.requires_grad;
      // A shared one leaves when the pipeline has added it up.
      if (is_parameter && ranks[id].size() == 1) by_use.emplace_back(first_use_[id], id);
    }
    std::sort(by_use.rbegin(), by_use.rend());
    for (const auto& [use, id] : by_use) {
      const int64_t bytes = graph_.values[id].spec.num_bytes();
      if (buckets_.empty() || buckets_.back().bytes + bytes > bucket_bytes) buckets_.emplace_back();
      GradientBucket& bucket = buckets_.back();
      bucket.bytes += bytes;
      bucket.flag_bytes += static_cast<int64_t>(c10::elementSize(graph_.values[id].spec.dtype));
      bucket.largest = std::max(bucket.largest, bytes);
      bucket.missing.insert(id);
    }
  }

  void note_extent(const NodeUse& use) {
    const Node& node = use.node;
    const ValueId id = node.outputs.empty() ? kNoValue : node.outputs.front();
    if (use.row.output_storage_bytes == nullptr || id == kNoValue || graph_.values[id].storage < 0) {
      return;
    }
    int64_t& extent = extents_[graph_.values[id].storage];
    extent = std::max(extent, use.row.output_storage_bytes(graph_, node));
  }

  void note_turn(ValueId id) {
    if (id == kNoValue || graph_.values[id].storage < 0) return;
    const auto& strides = graph_.values[id].spec.strides;
    const bool descends = std::is_sorted(strides.rbegin(), strides.rend());
    if (!descends) block_at(graph_.values[id].storage).is_turned = true;
  }

  void note_use(ValueId id, size_t position) {
    if (id == kNoValue || graph_.values[id].storage < 0) return;
    if (first_use_[id] == kNone) first_use_[id] = static_cast<int32_t>(position);
    Block& block = block_at(graph_.values[id].storage);
    if (!std::exchange(block.is_used, true)) block.first_use = position;
    block.last_use = position;
    block.is_kept = block.is_kept || roles_.kept.contains(id) || roles_.received.contains(id);
    block.is_root = block.is_root || roles_.roots.contains(id);
    block.is_result = block.is_result || roles_.results.contains(id);
    block.is_received = block.is_received || roles_.received.contains(id);
  }

  Block& block_at(int32_t storage) {
    int32_t& block = block_of_[storage];
    if (block == kNone) {
      block = static_cast<int32_t>(blocks_.size());
      blocks_.push_back({.storage = storage});
    }
    return blocks_[block];
  }

  int64_t bytes_of(const Block& block) const {
    const bool counts = block.is_own && !block.is_received;
    return counts && !is_permanent_[block.storage] ? extents_[block.storage] : 0;
  }

  int64_t written_bytes() const {
    std::set<int32_t> storages;
    for (const NodeUse& use : nodes_) {
      storages.insert(use.node.written_storages.begin(), use.node.written_storages.end());
    }
    int64_t bytes = 0;
    for (int32_t storage : storages) {
      const bool is_received = block_of_[storage] != kNone && blocks_[block_of_[storage]].is_received;
      if (is_received || is_permanent_[storage]) bytes += extents_[storage];
    }
    return bytes;
  }

  int64_t output_bytes() const {
    int64_t bytes = 0;
    for (const Block& block : blocks_) {
      if (block.is_kept || block.is_root || block.is_result) bytes += bytes_of(block);
    }
    return bytes;
  }

  /// Leaves in `blocks_` what is saved. Returns the peak.
  int64_t forward(int64_t& result_bytes) {
    ByteMeter meter(0);
    std::vector<std::vector<Block*>> dying(nodes_.size());
    for (Block& block : blocks_) dying[block.last_use].push_back(&block);
    const auto hold = [&](Block& block) {
      if (!std::exchange(block.is_held, true)) meter.hold(bytes_of(block));
    };
    for (Block& block : blocks_) {
      if (block.is_received) hold(block);
    }
    for (size_t k = 0; k < nodes_.size(); ++k) {
      const auto& [node, row, inputs, saved, extra_saved, _, run] = nodes_[k];
      for (ValueId id : node.outputs) {
        if (id != kNoValue && graph_.values[id].storage >= 0) hold(blocks_[block_of_[graph_.values[id].storage]]);
      }
      meter.touch(kScalarBytes + cast_bytes(graph_, node) + (row.workspace_bytes ? row.workspace_bytes(graph_, node) : 0));
      meter.hold(extra_saved);
      for (int32_t block : saved) ++blocks_[block].num_savers;
      for (Block* block : dying[k]) {
        let_die(*block, meter);
      }
      if (node_is_last_of_run(k)) forget(runs_[nodes_[k].run], meter);
    }
    const bool draws =
        std::any_of(nodes_.begin(), nodes_.end(), [](const NodeUse& use) { return use.node.random_ordinal >= 0; });
    if (draws) meter.touch(kGeneratorStateBytes);
    for (Block& block : blocks_) {
      if (!block.is_held) continue;
      const bool stays = block.num_savers > 0 || block.is_root;
      if (block.is_result) result_bytes += bytes_of(block);
      if (!stays) block.is_held = false;
      if (!stays || block.is_result) meter.drop(bytes_of(block));
    }
    saved_bytes_ = meter.now();
    return meter.peak();
  }

  bool node_is_last_of_run(size_t k) const { return nodes_[k].run != kNone && runs_[nodes_[k].run].end == k + 1; }

  void let_die(Block& block, ByteMeter& meter) const {
    if (block.num_savers > 0 || block.is_kept || block.is_root || block.is_result) return;
    if (std::exchange(block.is_held, false)) meter.drop(bytes_of(block));
  }

  /// What the forward of a run has saved goes, and what enters it stays.
  void forget(const Run& run, ByteMeter& meter) {
    for (size_t k = run.begin; k < run.end; ++k) {
      meter.drop(nodes_[k].extra_saved_bytes);
      for (int32_t block : nodes_[k].saved) --blocks_[block].num_savers;
    }
    for (size_t k = run.begin; k < run.end; ++k) {
      for (int32_t of_block : run.dying[k - run.begin]) {
        Block& block = blocks_[of_block];
        if (!is_made_in(run, block)) {
          ++block.num_savers;
        } else if (block.last_use < run.end) {
          let_die(block, meter);
        }
      }
    }
  }

  /// The forward of a run before its backward. What it makes a second time for others dies with it.
  void run_again(const Run& run, std::vector<Block>& blocks, ByteMeter& meter) const {
    std::set<int32_t> made;
    for (size_t k = run.begin; k < run.end; ++k) {
      const NodeUse& use = nodes_[k];
      for (ValueId id : use.node.outputs) {
        if (id == kNoValue || graph_.values[id].storage < 0) continue;
        const int32_t block = block_of_[graph_.values[id].storage];
        if (is_made_in(run, blocks[block]) && made.insert(block).second) meter.hold(bytes_of(blocks[block]));
      }
      meter.touch(kScalarBytes + cast_bytes(graph_, use.node) +
                  (use.row.workspace_bytes ? use.row.workspace_bytes(graph_, use.node) : 0));
      meter.hold(use.extra_saved_bytes);
      for (int32_t block : use.saved) ++blocks[block].num_savers;
      for (int32_t block : run.dying[k - run.begin]) {
        const bool is_input = !is_made_in(run, blocks[block]);
        if (is_input ? --blocks[block].num_savers == 0 : blocks[block].num_savers == 0) meter.drop(bytes_of(blocks[block]));
      }
    }
  }

  int64_t backward(bool is_first, bool is_last = false) {
    LeavingGradients leaving;
    if (is_last) leaving.buckets = buckets_;
    ByteMeter meter(saved_bytes_);
    std::vector<Block> blocks = blocks_;
    gradients_.clear();
    std::fill(gradient_of_.begin(), gradient_of_.end(), kNone);
    for (ValueId id : roles_.roots) {
      const int32_t gradient = make(0, meter);  // of another stage, or the executor's
      ++gradients_[gradient].num_holders;       // the engine's caller keeps what it passes in
      add(id, gradient, meter);
    }
    for (const Block& block : blocks) {
      if (block.is_root && block.num_savers == 0) drop(block, meter);
    }
    for (size_t k = nodes_.size(); k-- > 0;) {
      if (node_is_last_of_run(k)) run_again(runs_[nodes_[k].run], blocks, meter);
      step_back(k, is_first, blocks, leaving, meter);
    }
    while (leaving.next < leaving.buckets.size()) leaving.leave(meter);
    leaving.arrive(meter);
    return meter.peak();
  }

  void step_back(size_t k, bool is_first, std::vector<Block>& blocks, LeavingGradients& leaving, ByteMeter& meter) {
    if (!nodes_[k].has_backward) return;
    const auto& [node, row, inputs, saved, extra_saved, _, run] = nodes_[k];
    const ValueId* output = nullptr;  // the first with a gradient
    for (const ValueId& id : node.outputs) {
      if (output == nullptr && id != kNoValue && gradient_of_[id] != kNone) output = &id;
    }
    if (output == nullptr) return;  // no gradient comes here
    for (ValueId id : inputs) {
      if (!graph_.values[id].spec.requires_grad) continue;
      add(id, input_gradient(nodes_[k], id, *output, meter), meter);
    }
    meter.touch(backward_workspace(node, row, *output));
    for (ValueId id : node.outputs) {
      if (id != kNoValue) forget_gradient(id, meter);
    }
    for (ValueId id : inputs) {
      if (first_use_[id] == static_cast<int32_t>(k)) leaving.note_final(id, meter);
    }
    for (ValueId id : inputs) {
      const bool is_parameter = graph_.values[id].kind == ValueKind::kParameter;
      if (is_first || !is_parameter || first_use_[id] != static_cast<int32_t>(k)) continue;  // made here, or not whole
      forget_gradient(id, meter);
    }
    meter.drop(extra_saved);
    for (int32_t block : saved) {
      if (--blocks[block].num_savers == 0) drop(blocks[block], meter);
    }
  }

  void forget_gradient(ValueId id, ByteMeter& meter) {
    const int32_t gradient = std::exchange(gradient_of_[id], kNone);
    if (gradient != kNone) let_go(gradient, meter);
  }

  void drop(const Block& block, ByteMeter& meter) const {
    if (!block.is_result) meter.drop(bytes_of(block));
  }

  /// A product of more than two dimensions folds its gradient, too, into a copy if that comes through a transpose.
  int64_t backward_workspace(const Node& node, const OperatorRow& row, ValueId output) const {
    const TensorSpec& spec = graph_.values[output].spec;
    const bool folds = row.is_product && spec.sizes.size() > 2;
    const int32_t storage = graph_.values[output].storage;
    const bool is_turned = storage >= 0 && block_of_[storage] != kNone && blocks_[block_of_[storage]].is_turned;
    const int64_t copy = folds && is_turned ? spec.num_bytes() : 0;
    return kScalarBytes + copy + cast_bytes(graph_, node) +
           (row.backward_workspace_bytes ? row.backward_workspace_bytes(graph_, node) : 0);
  }

  int32_t make(int64_t asked_bytes, ByteMeter& meter) {
    const int64_t bytes = allocated(asked_bytes);
    meter.hold(bytes);
    gradients_.push_back({bytes, 1});
    return static_cast<int32_t>(gradients_.size()) - 1;
  }

  void let_go(int32_t gradient, ByteMeter& meter) {
    if (--gradients_[gradient].num_holders == 0) meter.drop(gradients_[gradient].bytes);
  }

  /// The gradient of input `id` of an operator, with one holder more than before.
  int32_t input_gradient(const NodeUse& use, ValueId id, ValueId output, ByteMeter& meter) {
    const auto& [node, row, inputs, saved, extra_saved, _, run] = use;
    const TensorSpec& spec = graph_.values[id].spec;
    const bool agrees =
        spec.num_elements() == graph_.values[output].spec.num_elements() && spec.dtype == graph_.values[output].spec.dtype;
    const bool is_same = agrees && (moves_nothing(graph_, node) || row.gradient == GradientForm::kSame);
    if (!is_same && row.gradient != GradientForm::kExpanded) return make(spec.num_bytes(), meter);
    const int32_t gradient = gradient_of_[output];
    ++gradients_[gradient].num_holders;
    return gradient;
  }

  /// Takes over one hold of `gradient`. A second one is added to the first in place, or into a new
  /// tensor where the first is shared.
  void add(ValueId id, int32_t gradient, ByteMeter& meter) {
    int32_t& known = gradient_of_[id];
    if (known == kNone) {
      known = gradient;
      return;
    }
    if (gradients_[known].num_holders > 1) {
      const int32_t sum = make(graph_.values[id].spec.num_bytes(), meter);
      let_go(known, meter);
      known = sum;
    }
    let_go(gradient, meter);
  }

  const Graph& graph_;
  const int64_t allocation_bytes_;
  std::vector<NodeUse> nodes_;  // in program order
  std::vector<Run> runs_;       // in program order
  const StageRoles roles_;
  std::vector<int64_t> extents_;  // by storage
  const std::vector<char> is_permanent_;
  std::vector<int32_t> block_of_;  // by storage
  std::vector<Block> blocks_;
  int64_t saved_bytes_ = 0;
  std::vector<Gradient> gradients_;
  std::vector<int32_t> gradient_of_;     // by value: among gradients_
  std::vector<int32_t> first_use_;       // by value: among nodes_
  std::vector<GradientBucket> buckets_;  // in the order in which they leave
};

}  // namespace

StageMemory stage_memory(const Graph& graph, const GradientFlow& flow, const Plan& plan, int stage, int64_t bucket_bytes,
                         bool buckets_are_shared, int64_t allocation_bytes) {
  return StageWalk(graph, flow, plan, stage, bucket_bytes, buckets_are_shared, allocation_bytes).run();
}

}  // namespace smp::partitioner
