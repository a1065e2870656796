// The recordings of one step function: a run that leaves the one it was matched with goes on with another that began in
// the same way, and those used least are forgotten.
#include <algorithm>

#include "partitioner/graph/graph_io.h"
#include "runtime/capture/body_capture.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

/// Whether two recordings agree on their first `num_nodes` operators, numbers aside that may change between runs.
bool same_beginning(const Recording& a, const Recording& b, NodeId num_nodes) {
  const auto num_values = static_cast<ptrdiff_t>(values_of_prefix(a.graph, num_nodes));
  if (b.graph.nodes.size() < static_cast<size_t>(num_nodes) || b.graph.inputs != a.graph.inputs) return false;
  if (values_of_prefix(b.graph, num_nodes) != num_values) return false;
  if (!std::equal(a.graph.values.begin(), a.graph.values.begin() + num_values, b.graph.values.begin()) ||
      !std::equal(a.same_impl.begin(), a.same_impl.begin() + num_values, b.same_impl.begin())) {
    return false;
  }
  for (NodeId n = 0; n < num_nodes; ++n) {
    if (a.calls[n].synthesised != b.calls[n].synthesised) return false;
  }
  return std::equal(a.graph.nodes.begin(), a.graph.nodes.begin() + num_nodes, b.graph.nodes.begin(),
                    [](const Node& x, const Node& y) {
                      return x.op == y.op && x.overload == y.overload && x.outputs == y.outputs &&
                             x.written_storages == y.written_storages && x.grad_enabled == y.grad_enabled &&
                             x.autocast == y.autocast && x.random_ordinal == y.random_ordinal;
                    });
}

}  // namespace

bool may_travel(const RecordedCall& call, size_t position, const Argument& value, const Argument& recorded) {
  const auto is_zero = [](const Argument& argument) {
    const auto* number = std::get_if<double>(&argument);
    return number != nullptr && *number == 0;
  };
  return call.info->argument_is_scalar[position] && !call.fixes_scalars && !call.info->scalars_set_geometry &&
         value.index() == recorded.index() && !std::holds_alternative<std::monostate>(value) &&
         !(call.info->zero_returns_argument && is_zero(value) != is_zero(recorded));
}

// Takes `candidate` in place of the recording matched so far, if the run up to here is a run of it as well.
bool BodyCapture::take_over(const std::shared_ptr<Recording>& candidate) {
  if (!same_beginning(*matching_, *candidate, position_)) return false;
  CapturedBody run{.recording = candidate, .scalars = {}, .constants = {}};
  for (NodeId n = 0; n < position_; ++n) {
    const Node &now = matching_->graph.nodes[n], &other = candidate->graph.nodes[n];
    for (size_t i = 0; i < now.arguments.size(); ++i) {
      const Argument* actual = &now.arguments[i];
      for (const ScalarOverride& changed : run_.scalars) {
        if (changed.node == n && changed.argument == static_cast<int32_t>(i)) actual = &changed.value;
      }
      if (same_argument(*actual, other.arguments[i])) continue;
      if (!may_travel(candidate->calls[n], i, *actual, other.arguments[i])) return false;
      run.scalars.push_back({n, static_cast<int32_t>(i), *actual});
    }
  }
  for (const ConstantTensor& constant : used_) {
    const auto recorded = std::find_if(candidate->constants.begin(), candidate->constants.end(),
                                       [&](const ConstantTensor& other) { return other.value == constant.value; });
    if (recorded == candidate->constants.end()) return false;
    if (!same_content(constant.content, recorded->content)) run.constants.push_back({constant.value, constant.content});
  }
  for (size_t k = 0; k < losses_.size(); ++k) {
    const auto &roots = candidate->graph.backward_roots, &own = matching_->graph.backward_roots;
    if (k >= roots.size() || roots[k] != own[k]) return false;
  }
  // What is made from here on lies with the ghosts that the body holds, where these share their memory.
  std::vector<c10::Storage> storages = candidate->storages;
  for (ValueId id = 0; id < values_of_prefix(candidate->graph, position_); ++id) {
    const auto storage = static_cast<size_t>(candidate->graph.values[id].storage);
    storages[storage] = storages_[storage];
  }
  matching_ = candidate;
  storages_ = std::move(storages);
  ghosts_.resize(candidate->graph.values.size(), weak(at::Tensor()));
  run_ = std::move(run);
  skip_synthesised();
  return true;
}

// `goes_on`: whether what comes next is what the recording taken over expects.
bool BodyCapture::switch_recording(const std::function<bool()>& goes_on) {
  const Bucket bucket = recordings_.at(key_);
  if (bucket.size() == 1) return false;
  const std::shared_ptr<Recording> own = matching_;
  const CapturedBody own_run = run_;
  const std::vector<c10::Storage> own_storages = storages_;
  const NodeId own_position = position_;
  const size_t own_copies = copies_.size();
  for (const auto& candidate : bucket) {
    if (candidate == own || !take_over(candidate)) continue;
    if (goes_on()) {
      Bucket& now = recordings_.at(key_);
      const auto at = std::find(now.begin(), now.end(), candidate);
      std::rotate(now.begin(), at, at + 1);
      return true;
    }
    matching_ = own;
    run_ = own_run;
    position_ = own_position;
    storages_ = own_storages;
    for (; copies_.size() > own_copies; copies_.pop_back()) as_ghost(copies_.back())->value = kNoValue;
    ghosts_.resize(own->graph.values.size(), weak(at::Tensor()));
  }
  return false;
}

void BodyCapture::forget_least_used() {
  size_t count = 0;
  for (const auto& [key, bucket] : recordings_) count += bucket.size();
  for (; count > max_recordings_; --count) {
    auto oldest = recordings_.begin();
    const auto by_use = [](const auto& a, const auto& b) { return a->last_use < b->last_use; };
    const auto least = [&](const Bucket& bucket) { return (*std::min_element(bucket.begin(), bucket.end(), by_use))->last_use; };
    for (auto at = recordings_.begin(); at != recordings_.end(); ++at) {
      if (least(at->second) < least(oldest->second)) oldest = at;
    }
    Bucket& bucket = oldest->second;
    bucket.erase(std::min_element(bucket.begin(), bucket.end(), by_use));
    if (bucket.empty()) recordings_.erase(oldest);
  }
}

}  // namespace smp::runtime
