// A run that leaves its recording goes on with another one that began in the same way.
#include <algorithm>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/matcher.h"

namespace smp::runtime {

using namespace partitioner;

// Takes `candidate` in place of the recording matched so far, if the run up to here is a run of it as well.
bool Matcher::take_over(const std::shared_ptr<Recording>& candidate, size_t num_roots) {
  if (!same_beginning(*at_.recording, *candidate, at_.position)) return false;
  CapturedBody run{.recording = candidate, .scalars = {}, .constants = {}};
  for (NodeId n = 0; n < at_.position; ++n) {
    const Node &now = at_.recording->graph.nodes[n], &other = candidate->graph.nodes[n];
    for (size_t i = 0; i < now.arguments.size(); ++i) {
      const Argument* actual = &now.arguments[i];
      for (const ScalarOverride& changed : at_.run.scalars) {
        if (changed.node == n && changed.argument == static_cast<int32_t>(i)) actual = &changed.value;
      }
      if (same_argument(*actual, other.arguments[i])) continue;
      if (!may_travel(candidate->calls[n], i, *actual, other.arguments[i])) return false;
      run.scalars.push_back({n, static_cast<int32_t>(i), *actual});
    }
  }
  for (const ConstantTensor& constant : at_.used) {
    const auto recorded = std::find_if(candidate->constants.begin(), candidate->constants.end(),
                                       [&](const ConstantTensor& other) { return other.value == constant.value; });
    if (recorded == candidate->constants.end()) return false;
    if (!same_content(constant.content, recorded->content)) run.constants.push_back({constant.value, constant.content});
  }
  for (size_t k = 0; k < num_roots; ++k) {
    const auto &roots = candidate->graph.backward_roots, &own = at_.recording->graph.backward_roots;
    if (k >= roots.size() || roots[k] != own[k]) return false;
  }
  // What is made from here on lies with the ghosts that the body holds, where these share their memory. A parameter has
  // none, unless the recording makes an alias of it.
  std::vector<c10::Storage> storages = candidate->storages;
  for (ValueId id = 0; id < values_of_prefix(candidate->graph, at_.position); ++id) {
    const auto storage = static_cast<size_t>(candidate->graph.values[id].storage);
    if (at_.storages[storage]) storages[storage] = at_.storages[storage];
  }
  at_.recording = candidate;
  at_.storages = std::move(storages);
  ghosts_.resize(candidate->graph.values.size(), weak(at::Tensor()));
  at_.run = std::move(run);
  skip_synthesised();
  return true;
}

std::shared_ptr<Recording> Matcher::switch_to_one_of(const std::vector<std::shared_ptr<Recording>>& others, size_t num_roots,
                                                     const std::function<bool()>& goes_on) {
  if (others.size() == 1) return nullptr;  // it is the own one
  const State own = at_;
  const Marks before = marks();
  for (const auto& candidate : others) {
    if (candidate == own.recording || !take_over(candidate, num_roots)) continue;
    if (goes_on()) return candidate;
    go_back_to(before);  // of the ghosts, which are numbered by the candidate
    at_ = own;
    ghosts_.resize(own.recording->graph.values.size(), weak(at::Tensor()));
  }
  return nullptr;
}

}  // namespace smp::runtime
