// How bodies are divided into regions.
#include "runtime/capture/recompute_regions.h"

#include <algorithm>
#include <mutex>

namespace smp::runtime {

using namespace partitioner;

namespace {

thread_local int num_open = 0;
thread_local int32_t num_entered = 0;
thread_local int64_t last_group = 0;

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
using MarkedModule = std::vector<WeakTensor>;

struct MarkedModules {
  std::mutex mutex;
  std::vector<MarkedModule> modules;
};

MarkedModules& marked_modules() {
  static MarkedModules all;
  return all;
}

/// Values of `recording` that are parameters of `module`.
std::vector<ValueId> parameters_of(const MarkedModule& module, const Recording& recording) {
  std::vector<ValueId> values;
  for (ValueId id = 0; id < static_cast<ValueId>(recording.graph.values.size()); ++id) {
    if (recording.graph.values[static_cast<size_t>(id)].kind != ValueKind::kParameter) continue;
    const c10::TensorImpl* tensor = recording.tensors[static_cast<size_t>(id)].unsafeGetTensorImpl();
    const bool is_own = std::any_of(module.begin(), module.end(), [&](const WeakTensor& weak) {
      return weak._unsafe_get_target() == tensor && !weak.expired();
    });
    if (is_own) values.push_back(id);
  }
  return values;
}

/// First and last operator of each call of the module.
std::vector<std::pair<NodeId, NodeId>> calls_of(const std::vector<ValueId>& parameters, const Graph& graph) {
  std::vector<std::pair<NodeId, NodeId>> calls;
  ValueId first = kNoValue;
  for (NodeId n = 0; n < static_cast<NodeId>(graph.nodes.size()); ++n) {
    for (const ValueId id : node_inputs(graph.nodes[static_cast<size_t>(n)])) {
      if (std::find(parameters.begin(), parameters.end(), id) == parameters.end()) continue;
      if (first == kNoValue) first = id;
      if (id == first) calls.emplace_back(n, n);
      calls.back().second = n;
    }
  }
  return calls;
}

}  // namespace

void enter_recompute_region(int64_t group, bool begins) {
  if (num_open++ > 0) return;
  const bool continues = group != 0 && group == last_group && !begins;
  last_group = group;
  if (!continues) ++num_entered;
}

void leave_recompute_region() noexcept {
  if (num_open > 0) --num_open;
}

int32_t current_recompute_region() { return num_open > 0 ? num_entered - 1 : -1; }

void begin_recompute_regions() {
  num_open = num_entered = 0;
  last_group = 0;
}

void mark_for_recomputation(const std::vector<at::Tensor>& parameters) {
  MarkedModules& marked = marked_modules();
  const std::lock_guard lock(marked.mutex);
  MarkedModule& module = marked.modules.emplace_back();
  for (const at::Tensor& parameter : parameters) module.emplace_back(parameter.getIntrusivePtr());
}

void add_marked_regions(Recording& recording) {
  MarkedModules& marked = marked_modules();
  const std::lock_guard lock(marked.mutex);
  std::vector<Node>& nodes = recording.graph.nodes;
  int32_t next = 0;
  for (const Node& node : nodes) next = std::max(next, node.recompute_region + 1);
  for (const MarkedModule& module : marked.modules) {
    const std::vector<ValueId> parameters = parameters_of(module, recording);
    if (parameters.empty()) continue;
    for (const auto& [first, last] : calls_of(parameters, recording.graph)) {
      for (NodeId n = first; n <= last; ++n) {
        int32_t& region = nodes[static_cast<size_t>(n)].recompute_region;
        if (region < 0) region = next;
      }
      ++next;
    }
  }
}

}  // namespace smp::runtime
