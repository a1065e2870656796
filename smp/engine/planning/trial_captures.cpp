// Bodies run for their graphs.
#include "smp/engine/planning/trial_captures.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "smp/engine/arguments/local_values.h"
#include "smp/engine/arguments/run_body.h"
#include "smp/engine/arguments/split.h"
#include "smp/engine/rank/rank_state.h"

namespace smp::engine {

using partitioner::Graph;

namespace {

/// Thrown through a body that reads a value which only a run could tell; through an interpreter's frames as well, which
/// translate what the standard knows.
struct BodyStopped : std::exception {};

}  // namespace

const Graph* TrialCaptures::graph(int64_t parts) {
  const auto [known, is_new] = captured_.try_emplace(parts);
  std::optional<Captured>& captured = known->second;
  if (is_new) {
    try {
      std::vector<at::Tensor> inputs =
          split_arguments(call_.arguments({.microbatches = parts}), {.microbatches = parts}).front();
      captured = Captured{capture(inputs), inputs};
    } catch (...) {
      if (!first_error_) first_error_ = std::current_exception();
    }
  }
  return captured ? &captured->graph : nullptr;
}

const std::vector<at::Tensor>& TrialCaptures::inputs_of(const Graph* graph) const {
  const auto captured = std::find_if(captured_.begin(), captured_.end(),
                                     [graph](const auto& entry) { return entry.second && &entry.second->graph == graph; });
  TORCH_INTERNAL_ASSERT(captured != captured_.end(), "a graph of other captures");
  return captured->second->inputs;
}

Graph TrialCaptures::capture(const std::vector<at::Tensor>& inputs) {
  runtime::BodyCapture capture(rank_.models.bindings());
  std::optional<Graph> until_read;
  const runtime::ValueReader read_or_stop = [&](const runtime::ValueRead& wanted) {
    const auto local = runtime::local_slice(wanted.graph, wanted.num_nodes, wanted.values);
    if (local) return compute_locally(wanted, *local, inputs, rank_.models.bindings(), {});
    until_read = wanted.graph;
    until_read->read = wanted.values;
    until_read->returned.clear();
    throw BodyStopped{};
  };
  capture.set_reader(read_or_stop, call_.cpu_is_read);
  const HeldGradients gradients(rank_.models.bindings());
  try {
    const runtime::CapturedBody whole =
        run_body(rank_.context, capture, call_, inputs, rank_.models.training_flags(), /*m=*/0);
    if (!until_read) return whole.recording->graph;
  } catch (...) {
    if (!until_read) throw;
  }
  return std::move(*until_read);  // whatever a body that caught what stopped it has done without the value
}

}  // namespace smp::engine
