// A forward and a backward, performed on sizes only.
#include "partitioner/plan/stage_memory.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/operator_cost.h"
#include "partitioner/cost/operator_table.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/plan/stage_roles.h"

namespace smp::partitioner {
namespace {

/// Bytes that are held now, and the most that ever were.
class Meter {
 public:
  explicit Meter(int64_t bytes) : now_(bytes), peak_(bytes) {}
  void hold(int64_t bytes) { peak_ = std::max(peak_, now_ += bytes); }
  void drop(int64_t bytes) { now_ -= bytes; }
  void touch(int64_t bytes) { peak_ = std::max(peak_, now_ + bytes); }
  int64_t now() const { return now_; }
  int64_t peak() const { return peak_; }

 private:
  int64_t now_, peak_;
};

// The copy of the generator's state from which the user's random numbers are restored after a
// forward that draws some.
constexpr int64_t kGeneratorStateBytes = 5056;

// Numbers that become tensors on their way into a kernel.
constexpr int64_t kScalarBytes = 64;

class StageWalk {
 public:
  StageWalk(const Graph& graph, const Plan& plan, int stage, int64_t bucket_bytes)
      : graph_(graph),
        roles_(stage_roles(graph, plan, stage)),
        extents_(storage_bytes(graph)),
        is_permanent_(permanent_storages(graph)) {
    const std::vector<NodeId>& nodes = plan.stages[stage].nodes;
    nodes_.reserve(nodes.size());
    for (size_t k = 0; k < nodes.size(); ++k) {
      const Node& node = graph.nodes[nodes[k]];
      NodeUse& use = nodes_.emplace_back(NodeUse{node, operator_row(node), node_inputs(node), {}});
      for (ValueId id : use.inputs) note_use(id, k);
      for (ValueId id : node.outputs) {
        note_use(id, k);
        note_turn(id);
        if (id != kNoValue && graph.values[id].producer == nodes[k]) is_own_.insert(graph.values[id].storage);
      }
      note_extent(use);
      use.has_backward = graph.has_backward() && has_backward(graph, node);
      if (!use.has_backward) continue;
      use.saved = saved_storages(graph, node, is_permanent_);
      use.extra_saved_bytes = extra_saved_bytes(graph, node);
    }
    if (bucket_bytes > 0) fill_buckets(plan, bucket_bytes);
  }

  StageMemory run() {
    StageMemory memory;
    memory.forward = forward(memory.results);
    memory.saved = saved_bytes_;
    memory.written = written_bytes();
    memory.outputs = output_bytes();
    for (ValueId id : roles_.received) {
      const auto block = blocks_.find(graph_.values[id].storage);
      if (block == blocks_.end()) continue;
      if (block->second.is_result) memory.returned_arrivals.insert(id);
      if (block->second.is_held) memory.saved_arrivals.insert(id);
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
  struct NodeUse {
    const Node& node;
    const OperatorRow& row;
    std::vector<ValueId> inputs;
    std::vector<int32_t> saved;  // storages
    int64_t extra_saved_bytes = 0;
    bool has_backward = false;
  };
  struct Block {
    size_t last_use = 0;
    bool is_kept = false;    // until the end of the forward
    bool is_root = false;    // until the backward begins
    bool is_result = false;  // until the step ends
    int num_savers = 0;      // operators whose backward is still to come
    bool is_held = false;
  };
  struct Gradient {
    int64_t bytes = 0;
    int num_holders = 0;
  };

  /// Gradients that travel together, from the last parameter on. (runtime/gradient_reducer.cpp)
  struct Bucket {
    int64_t bytes = 0;
    int64_t flag_bytes = 0;  // one number for each, whether it is there
    int64_t largest = 0;
    std::set<ValueId> missing{};
    /// Itself, and what comes for it.
    int64_t under_way_bytes() const { return 2 * (bytes + flag_bytes); }
  };

  void fill_buckets(const Plan& plan, int64_t bucket_bytes) {
    std::map<ValueId, std::set<int>> ranks;
    for (const StagePlan& other : plan.stages) {
      for (ValueId id : other.parameters) ranks[id].insert(other.rank);
    }
    std::vector<std::pair<size_t, ValueId>> by_use;
    for (const auto& [id, use] : first_use_) {
      const Value& value = graph_.values[id];
      const bool is_parameter = value.kind == ValueKind::kParameter && value.spec.requires_grad;
      // A shared one leaves when the pipeline has added it up.
      if (is_parameter && ranks[id].size() == 1) by_use.emplace_back(use, id);
    }
    std::sort(by_use.rbegin(), by_use.rend());
    for (const auto& [use, id] : by_use) {
      const int64_t bytes = graph_.values[id].spec.num_bytes();
      if (buckets_.empty() || buckets_.back().bytes + bytes > bucket_bytes) buckets_.emplace_back();
      Bucket& bucket = buckets_.back();
      bucket.bytes += bytes;
      bucket.flag_bytes += static_cast<int64_t>(c10::elementSize(graph_.values[id].spec.dtype));
      bucket.largest = std::max(bucket.largest, bytes);
      bucket.missing.insert(id);
    }
  }

  /// One bucket is under way at a time. When the next leaves, or the step ends, each gradient is
  /// copied out of the sum into a new tensor.
  struct Leaving {
    std::vector<Bucket> buckets;
    size_t next = 0;
    int64_t under_way = 0;

    void note_final(ValueId id, Meter& meter) {
      for (Bucket& bucket : buckets) bucket.missing.erase(id);
      while (next < buckets.size() && buckets[next].missing.empty()) leave(meter);
    }
    void leave(Meter& meter) {
      arrive(meter);
      under_way = buckets[next++].under_way_bytes();
      meter.hold(under_way);
    }
    void arrive(Meter& meter) {
      if (next > 0) meter.touch(buckets[next - 1].largest);
      meter.drop(std::exchange(under_way, 0));
    }
  };

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
    if (id == kNoValue) return;
    const auto& strides = graph_.values[id].spec.strides;
    const bool descends = std::is_sorted(strides.rbegin(), strides.rend());
    if (!descends) turned_.insert(graph_.values[id].storage);
  }

  void note_use(ValueId id, size_t position) {
    if (id == kNoValue || graph_.values[id].storage < 0) return;
    first_use_.emplace(id, position);
    Block& block = blocks_[graph_.values[id].storage];
    block.last_use = position;
    block.is_kept = block.is_kept || roles_.kept.contains(id) || roles_.received.contains(id);
    block.is_root = block.is_root || roles_.roots.contains(id);
    block.is_result = block.is_result || roles_.results.contains(id);
    if (roles_.received.contains(id)) received_.insert(graph_.values[id].storage);
  }

  int64_t bytes_of(int32_t storage) const {
    const bool counts = is_own_.contains(storage) && !received_.contains(storage);
    return counts && !is_permanent_[storage] ? extents_[storage] : 0;
  }

  int64_t written_bytes() const {
    std::set<int32_t> storages;
    for (const NodeUse& use : nodes_) {
      storages.insert(use.node.written_storages.begin(), use.node.written_storages.end());
    }
    int64_t bytes = 0;
    for (int32_t storage : storages) {
      const bool was_there = received_.contains(storage) || is_permanent_[storage];
      if (was_there) bytes += extents_[storage];
    }
    return bytes;
  }

  int64_t output_bytes() const {
    int64_t bytes = 0;
    for (const auto& [storage, block] : blocks_) {
      if (block.is_kept || block.is_root || block.is_result) bytes += bytes_of(storage);
    }
    return bytes;
  }

  /// Leaves in `blocks_` what is saved. Returns the peak.
  int64_t forward(int64_t& result_bytes) {
    Meter meter(0);
    std::map<size_t, std::vector<int32_t>> dying;
    for (const auto& [storage, block] : blocks_) dying[block.last_use].push_back(storage);
    const auto hold = [&](int32_t storage) {
      if (storage >= 0 && !std::exchange(blocks_[storage].is_held, true)) {
        meter.hold(bytes_of(storage));
      }
    };
    for (int32_t storage : received_) hold(storage);
    for (size_t k = 0; k < nodes_.size(); ++k) {
      const auto& [node, row, inputs, saved, extra_saved, _] = nodes_[k];
      for (ValueId id : node.outputs) {
        if (id != kNoValue) hold(graph_.values[id].storage);
      }
      meter.touch(kScalarBytes + (row.workspace_bytes ? row.workspace_bytes(graph_, node) : 0));
      meter.hold(extra_saved);
      for (int32_t s : saved) ++blocks_[s].num_savers;
      for (int32_t storage : dying[k]) {
        Block& block = blocks_[storage];
        if (block.num_savers > 0 || block.is_kept || block.is_root || block.is_result) continue;
        if (std::exchange(block.is_held, false)) meter.drop(bytes_of(storage));
      }
    }
    const bool draws = std::any_of(nodes_.begin(), nodes_.end(),
                                   [](const NodeUse& use) { return use.node.random_ordinal >= 0; });
    if (draws) meter.touch(kGeneratorStateBytes);
    for (auto& [storage, block] : blocks_) {
      if (!block.is_held) continue;
      const bool stays = block.num_savers > 0 || block.is_root;
      if (block.is_result) result_bytes += bytes_of(storage);
      if (!stays) block.is_held = false;
      if (!stays || block.is_result) meter.drop(bytes_of(storage));
    }
    saved_bytes_ = meter.now();
    return meter.peak();
  }

  int64_t backward(bool is_first, bool is_last = false) {
    Leaving leaving;
    if (is_last) leaving.buckets = buckets_;
    Meter meter(saved_bytes_);
    std::map<int32_t, Block> blocks = blocks_;
    gradients_.clear();
    gradient_of_.clear();
    for (ValueId id : roles_.roots) {
      const size_t gradient = make(0, meter);  // of another stage, or the executor's
      ++gradients_[gradient].num_holders;      // the engine's caller keeps what it passes in
      add(id, gradient, meter);
    }
    for (auto& [storage, block] : blocks) {
      if (block.is_root && block.num_savers == 0) drop(storage, block, meter);
    }
    for (size_t k = nodes_.size(); k-- > 0;) step_back(k, is_first, blocks, leaving, meter);
    while (leaving.next < leaving.buckets.size()) leaving.leave(meter);
    leaving.arrive(meter);
    return meter.peak();
  }

  void step_back(size_t k, bool is_first, std::map<int32_t, Block>& blocks, Leaving& leaving,
                 Meter& meter) {
    if (!nodes_[k].has_backward) return;
    const auto& [node, row, inputs, saved, extra_saved, _] = nodes_[k];
    const ValueId* output = nullptr;  // the first with a gradient
    for (const ValueId& id : node.outputs) {
      if (output == nullptr && gradient_of_.contains(id)) output = &id;
    }
    if (output == nullptr) return;  // no gradient comes here
    for (ValueId id : inputs) {
      if (!graph_.values[id].spec.requires_grad) continue;
      add(id, input_gradient(nodes_[k], id, *output, meter), meter);
    }
    meter.touch(backward_workspace(node, row, *output));
    for (ValueId id : node.outputs) {
      if (const auto found = gradient_of_.extract(id)) let_go(found.mapped(), meter);
    }
    for (ValueId id : inputs) {
      const auto use = first_use_.find(id);
      if (use != first_use_.end() && use->second == k) leaving.note_final(id, meter);
    }
    for (ValueId id : inputs) {
      const bool is_parameter = graph_.values[id].kind == ValueKind::kParameter;
      if (is_first || !is_parameter || first_use_.at(id) != k) continue;  // made here, or not whole
      if (const auto found = gradient_of_.extract(id)) let_go(found.mapped(), meter);
    }
    meter.drop(extra_saved);
    for (int32_t storage : saved) {
      if (--blocks[storage].num_savers == 0) drop(storage, blocks[storage], meter);
    }
  }

  void drop(int32_t storage, const Block& block, Meter& meter) const {
    if (!block.is_result) meter.drop(bytes_of(storage));
  }

  /// A product of more than two dimensions folds its gradient, too, into a copy if that comes
  /// through a transpose.
  int64_t backward_workspace(const Node& node, const OperatorRow& row, ValueId output) const {
    const TensorSpec& spec = graph_.values[output].spec;
    const bool folds = row.is_product && spec.sizes.size() > 2;
    const int64_t copy =
        folds && turned_.contains(graph_.values[output].storage) ? spec.num_bytes() : 0;
    return kScalarBytes + copy +
           (row.backward_workspace_bytes ? row.backward_workspace_bytes(graph_, node) : 0);
  }

  size_t make(int64_t bytes, Meter& meter) {
    meter.hold(bytes);
    gradients_.push_back({bytes, 1});
    return gradients_.size() - 1;
  }

  void let_go(size_t gradient, Meter& meter) {
    if (--gradients_[gradient].num_holders == 0) meter.drop(gradients_[gradient].bytes);
  }

  /// The gradient of input `id` of an operator, with one holder more than before.
  size_t input_gradient(const NodeUse& use, ValueId id, ValueId output, Meter& meter) {
    const auto& [node, row, inputs, saved, extra_saved, _] = use;
    const TensorSpec& spec = graph_.values[id].spec;
    const bool agrees = spec.num_elements() == graph_.values[output].spec.num_elements() &&
                        spec.dtype == graph_.values[output].spec.dtype;
    const bool is_same =
        agrees && (moves_nothing(graph_, node) || row.gradient == GradientForm::kSame);
    if (!is_same && row.gradient != GradientForm::kExpanded) return make(spec.num_bytes(), meter);
    const size_t gradient = gradient_of_.at(output);
    ++gradients_[gradient].num_holders;
    return gradient;
  }

  /// Takes over one hold of `gradient`. A second one is added to the first in place, or into a new
  /// tensor where the first is shared.
  void add(ValueId id, size_t gradient, Meter& meter) {
    const auto [known, is_new] = gradient_of_.emplace(id, gradient);
    if (is_new) return;
    if (gradients_[known->second].num_holders > 1) {
      const size_t sum = make(graph_.values[id].spec.num_bytes(), meter);
      let_go(known->second, meter);
      known->second = sum;
    }
    let_go(gradient, meter);
  }

  const Graph& graph_;
  std::vector<NodeUse> nodes_;  // in program order
  const StageRoles roles_;
  std::vector<int64_t> extents_;  // by storage
  const std::vector<char> is_permanent_;
  std::map<int32_t, Block> blocks_;  // by storage
  std::set<int32_t> is_own_;         // made or received here; inputs of rank 0 are the step's
  std::set<int32_t> received_;
  std::set<int32_t> turned_;  // with a view whose dimensions are in another order
  int64_t saved_bytes_ = 0;
  std::vector<Gradient> gradients_;
  std::map<ValueId, size_t> gradient_of_;
  std::map<ValueId, size_t> first_use_;
  std::vector<Bucket> buckets_;  // in the order in which they leave
};

}  // namespace

StageMemory stage_memory(const Graph& graph, const Plan& plan, int stage, int64_t bucket_bytes) {
  return StageWalk(graph, plan, stage, bucket_bytes).run();
}

}  // namespace smp::partitioner
