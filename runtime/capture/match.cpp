// A run that leaves its recording may be one of another that began in the same way.
#include "runtime/capture/match.h"

#include <algorithm>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/places.h"

namespace smp::runtime {

using namespace partitioner;

const std::string& Match::module() const {
  static const std::string none;
  if (position == 0) return none;
  const Graph& graph = recording->graph;
  return module_in_texts(graph, values_of_prefix(graph, position), graph.nodes[static_cast<size_t>(position - 1)].module);
}

CapturedBody Match::finish() const {
  CapturedBody ended = run;
  for (const ConstantTensor& constant : used) {
    if (owns_memory(constant.tensor)) check_unchanged(constant, describe_place("capture", module()));
    ended.outside.push_back(constant.tensor);
  }
  return ended;
}

std::optional<Match> Match::of(const std::shared_ptr<Recording>& candidate, size_t num_roots) const {
  if (!same_beginning(*recording, *candidate, position)) return {};
  Match other{.recording = candidate, .position = position, .used = used, .storages = candidate->storages};
  other.run.recording = candidate;
  for (NodeId n = 0; n < position; ++n) {
    const Node &now = recording->graph.nodes[n], &recorded = candidate->graph.nodes[n];
    for (size_t i = 0; i < now.arguments.size(); ++i) {
      const Argument* actual = &now.arguments[i];
      for (const ScalarOverride& changed : run.scalars) {
        if (changed.node == n && changed.argument == static_cast<int32_t>(i)) actual = &changed.value;
      }
      if (same_argument(*actual, recorded.arguments[i])) continue;
      if (!may_travel(candidate->calls[n], i, *actual, recorded.arguments[i])) return {};
      other.run.scalars.push_back({n, static_cast<int32_t>(i), *actual});
    }
  }
  for (const ConstantTensor& constant : used) {
    const auto recorded = std::find_if(candidate->constants.begin(), candidate->constants.end(),
                                       [&](const ConstantTensor& each) { return each.value == constant.value; });
    if (recorded == candidate->constants.end()) return {};
    if (!same_content(constant.content, recorded->content))
      other.run.constants.push_back({constant.value, constant.content});
  }
  const auto &roots = candidate->graph.backward_roots, &own = recording->graph.backward_roots;
  for (size_t k = 0; k < num_roots; ++k) {
    if (k >= roots.size() || roots[k] != own[k]) return {};
  }
  // What is made from here on lies with the ghosts that the body holds, where these share their memory. A parameter has
  // none, unless the recording makes an alias of it.
  for (ValueId id = 0; id < values_of_prefix(candidate->graph, position); ++id) {
    const auto storage = static_cast<size_t>(candidate->graph.values[id].storage);
    if (storages[storage]) other.storages[storage] = storages[storage];
  }
  other.skip_synthesised();
  return other;
}

}  // namespace smp::runtime
