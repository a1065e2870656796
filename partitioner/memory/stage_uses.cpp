#include "partitioner/memory/stage_uses.h"

#include <algorithm>
#include <map>
#include <utility>

#include "partitioner/cost/memory_model.h"
#include "partitioner/cost/remade_nodes.h"
#include "partitioner/graph/cuts.h"
#include "partitioner/graph/tensor_bytes.h"

namespace smp::partitioner {

Remade remade_of(const Graph& graph, const GradientFlow& flow, const Plan& plan) {
  if (plan.recomputation.is_empty()) return {};
  Remade remade;
  std::map<std::pair<int, int32_t>, int32_t> numbers;
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    const int32_t region = plan.recomputation.region_of(n);
    const auto next = static_cast<int32_t>(numbers.size());
    const auto number = [&] { return numbers.try_emplace({plan.stage_of_node[n], region}, next).first->second; };
    remade.piece.push_back(region == kNoRegion ? StageUses::kNone : number());
  }
  remade.inner = inner_storages(graph, remade.piece, plan.recomputation.is_kept);
  remade.nodes = remade_nodes(graph, flow, remade.piece, plan.recomputation.is_kept);
  return remade;
}

StageUses::StageUses(const Graph& graph, const GradientFlow& flow, const Plan& plan, int stage,
                     const BucketOptions& averaged, int64_t allocation_bytes, const Remade& remade, RunsAgain runs_again)
    : roles(stage_roles(graph, plan, stage)),
      is_permanent(permanent_storages(graph)),
      extents(storage_bytes(graph)),
      block_of(extents.size(), kNone),
      first_use(graph.values.size(), kNone),
      graph_(graph) {
  const std::vector<NodeId>& of_stage = plan.stages[static_cast<size_t>(stage)].nodes;
  nodes.reserve(of_stage.size());
  for (const NodeId n : of_stage) add_node(n, flow, allocation_bytes);
  if (!plan.recomputation.is_empty()) find_runs(remade, of_stage, runs_again);
  for (int64_t& extent : extents) extent = rounded_up(extent, allocation_bytes);
  if (averaged.bytes > 0) fill_buckets(plan, averaged);
}

void StageUses::add_node(NodeId n, const GradientFlow& flow, int64_t allocation_bytes) {
  const Node& node = graph_.nodes[static_cast<size_t>(n)];
  const size_t k = nodes.size();
  NodeUse& use = nodes.emplace_back(NodeUse{node, operator_row(node), node_inputs(node), {}});
  for (ValueId id : use.inputs) note_use(id, k);
  for (ValueId id : node.outputs) {
    note_use(id, k);
    note_turn(id);
    if (id == kNoValue || graph_.values[id].storage < 0) continue;
    if (graph_.values[id].producer == n) block_at(graph_.values[id].storage).is_own = true;
  }
  note_extent(use);
  use.has_backward = flow.passes_gradient(n);
  if (!use.has_backward) return;
  for (int32_t storage : saved_storages(graph_, node, is_permanent)) {
    block_at(storage);
    use.saved.push_back(block_of[storage]);
  }
  use.extra_saved_bytes = rounded_up(extra_saved_bytes(graph_, node), allocation_bytes);
}

void StageUses::find_runs(const Remade& remade, const std::vector<NodeId>& of_stage, RunsAgain runs_again) {
  for (size_t begin = 0, end; begin < of_stage.size(); begin = end) {
    const int32_t piece = remade.piece[of_stage[begin]];
    bool has_backward = false;
    for (end = begin; end < of_stage.size() && remade.piece[of_stage[end]] == piece; ++end) {
      has_backward = has_backward || nodes[end].has_backward;
    }
    if (piece != kNone && has_backward) add_run({.begin = begin, .end = end});
  }
  const bool is_all = runs_again == RunsAgain::kAll;
  for (size_t k = 0; k < of_stage.size(); ++k) {
    NodeUse& use = nodes[k];
    use.is_again = use.run != kNone && (is_all || remade.nodes[of_stage[k]]);
    for (ValueId id : use.node.outputs) {
      if (id == kNoValue || graph_.values[id].storage < 0) continue;
      Block& block = blocks[block_of[graph_.values[id].storage]];
      block.is_again =
          block.is_again || (use.is_again && (is_all || remade.inner[block.storage] == remade.piece[of_stage[k]]));
    }
  }
  for (const NodeUse& use : nodes) {
    if (!use.is_again) continue;
    Run& run = runs[use.run];
    for (ValueId id : use.inputs) {
      if (graph_.values[id].storage < 0) continue;
      const int32_t block = block_of[graph_.values[id].storage];
      if (!is_made_again_in(run, blocks[block])) run.held.insert(block);
    }
  }
}

void StageUses::add_run(Run run) {
  std::map<int32_t, size_t> last_use;
  const auto note = [&](ValueId id, size_t k) {
    if (id != kNoValue && graph_.values[id].storage >= 0) last_use[block_of[graph_.values[id].storage]] = k - run.begin;
  };
  for (size_t k = run.begin; k < run.end; ++k) {
    nodes[k].run = static_cast<int32_t>(runs.size());
    for (ValueId id : nodes[k].inputs) note(id, k);
    for (ValueId id : nodes[k].node.outputs) note(id, k);
  }
  run.dying.resize(run.end - run.begin);
  for (const auto& [block, last] : last_use) run.dying[last].push_back(block);
  runs.push_back(std::move(run));
}

void StageUses::fill_buckets(const Plan& plan, const BucketOptions& averaged) {
  std::map<ValueId, std::set<int>> ranks;
  for (const StagePlan& other : plan.stages) {
    for (ValueId id : other.parameters) ranks[id].insert(other.rank);
  }
  std::vector<std::pair<int32_t, ValueId>> by_use;
  for (ValueId id = 0; id < static_cast<ValueId>(first_use.size()); ++id) {
    if (first_use[id] == kNone) continue;
    const Value& value = graph_.values[id];
    const bool is_parameter = value.kind == ValueKind::kParameter && value.spec.requires_grad;
    // A shared one leaves when the pipeline has added it up.
    if (is_parameter && ranks[id].size() == 1) by_use.emplace_back(first_use[id], id);
  }
  std::sort(by_use.rbegin(), by_use.rend());
  for (const auto& [use, id] : by_use) {
    const int64_t bytes = graph_.values[id].spec.num_bytes();
    if (buckets.empty() || buckets.back().bytes + bytes > averaged.bytes) buckets.emplace_back();
    GradientBucket& bucket = buckets.back();
    bucket.bytes += bytes;
    bucket.flag_bytes += static_cast<int64_t>(c10::elementSize(graph_.values[id].spec.dtype));
    bucket.largest = std::max(bucket.largest, bytes);
    bucket.missing.insert(id);
    bucket.is_shared = averaged.are_shared;
  }
}

void StageUses::note_extent(const NodeUse& use) {
  const Node& node = use.node;
  const ValueId id = node.outputs.empty() ? kNoValue : node.outputs.front();
  if (use.row.output_storage_bytes == nullptr || id == kNoValue || graph_.values[id].storage < 0) {
    return;
  }
  int64_t& extent = extents[graph_.values[id].storage];
  extent = std::max(extent, use.row.output_storage_bytes(graph_, node));
}

void StageUses::note_turn(ValueId id) {
  if (id == kNoValue || graph_.values[id].storage < 0) return;
  const auto& strides = graph_.values[id].spec.strides;
  const bool descends = std::is_sorted(strides.rbegin(), strides.rend());
  if (!descends) block_at(graph_.values[id].storage).is_turned = true;
}

void StageUses::note_use(ValueId id, size_t position) {
  if (id == kNoValue || graph_.values[id].storage < 0) return;
  if (first_use[id] == kNone) first_use[id] = static_cast<int32_t>(position);
  Block& block = block_at(graph_.values[id].storage);
  if (!std::exchange(block.is_used, true)) block.first_use = position;
  block.last_use = position;
  block.is_kept = block.is_kept || roles.kept.contains(id) || roles.received.contains(id);
  block.is_root = block.is_root || roles.roots.contains(id);
  block.is_result = block.is_result || roles.results.contains(id);
  block.is_received = block.is_received || roles.received.contains(id);
}

StageUses::Block& StageUses::block_at(int32_t storage) {
  int32_t& block = block_of[storage];
  if (block == kNone) {
    block = static_cast<int32_t>(blocks.size());
    blocks.push_back({.storage = storage});
  }
  return blocks[block];
}

int64_t StageUses::bytes_of(const Block& block) const {
  const bool counts = block.is_own && !block.is_received;
  return counts && !is_permanent[block.storage] ? extents[block.storage] : 0;
}

}  // namespace smp::partitioner
