// One stage of a hand-made graph with its tensors, run under autograd while a recorder looks on, or from the tape of that.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/stage/autograd_stage.h"
#include "runtime/stage/tape.h"
#include "runtime/stage/tape_recorder.h"
#include "tests/unit/runtime/stage/stage_graphs.h"

namespace smp::runtime::stage_graphs {

using Tensors = std::vector<at::Tensor>;

/// What leaves a stage in one microbatch.
struct Left {
  Tensors outputs{};
  Tensors results{};                          // gradients of its inputs
  std::map<ValueId, at::Tensor> gradients{};  // of parameters
};

class WatchedStage {
 public:
  explicit WatchedStage(Graph of, int num_ranks = 1, const std::map<std::string, int>& pins = {}, int stage = 0)
      : graph(std::move(of)), plan(pinned(graph, num_ranks, pins)), reference(graph, plan, stage, {}) {
    for (const ValueId id : reference.own_values()) {
      const partitioner::Value& value = graph.values[static_cast<size_t>(id)];
      tensors[id] = numbers(value.spec.sizes, id).requires_grad_(value.spec.requires_grad);
    }
  }

  /// To be given to run_autograd().
  TapeRecorder recorder() const {
    std::vector<TapeOwn> own;
    for (const ValueId id : reference.own_values()) {
      own.push_back({{.value = id}, tensors.at(id), partitioner::is_named(graph.values[static_cast<size_t>(id)])});
    }
    return TapeRecorder(std::move(own));
  }

  Left run_autograd(const Tensors& inputs, const MicrobatchContext& context = {}, TapeRecorder* recorder = nullptr) {
    for (auto& [id, tensor] : tensors) tensor.mutable_grad().reset();
    Left left{.outputs = reference.forward(context, inputs, [this](ValueId id) { return tensors.at(id); }, recorder)};
    if (recorder != nullptr) recorder->end_forward(left.outputs);
    if (!reference.values().has_backward) return left;
    const Tensors entering = roots();
    if (recorder != nullptr) recorder->begin_backward(entering);
    left.results = reference.backward(context.microbatch, 0, entering);
    if (recorder != nullptr) recorder->end_backward(left.results);
    for (auto& [id, tensor] : tensors) {
      if (tensor.grad().defined()) left.gradients[id] = tensor.grad();
    }
    return left;
  }

  /// Forward, backward and what that has left; `sunk` receives the gradients of parameters in their order.
  Left run_tape(Tape& tape, const Tensors& inputs, const MicrobatchContext& context = {}, Slots* slots_of = nullptr) const {
    Slots own_slots;
    Slots& slots = slots_of == nullptr ? own_slots : *slots_of;
    Left left{.outputs = tape.forward(slots, inputs, own(), run_context(context))};
    if (!reference.values().has_backward) return left;
    const GradientSink sink = sink_into(left, tape);
    left.results = tape.backward(slots, 0, roots(), run_context(context), sink);
    tape.weight_gradients(slots, run_context(context), sink);
    return left;
  }

  /// Of the microbatch that `inputs` are.
  Tape taped(const Tensors& inputs, const MicrobatchContext& context = {}) {
    TapeRecorder watching = recorder();
    run_autograd(inputs, context, &watching);
    EXPECT_EQ(watching.refusal(), "");
    return Tape(watching.take(), graph);
  }

  GradientSink sink_into(Left& left, const Tape& tape) const {
    return [&left, &tape](size_t own, at::Tensor gradient) {
      left.gradients[tape.lists().own[own].value] = std::move(gradient);
    };
  }
  Tape::RunContext run_context(const MicrobatchContext& context) const {
    return {context.random, context.microbatch, progress, timer};
  }
  Tensors own() const {
    Tensors all;
    for (const ValueId id : reference.own_values()) all.push_back(tensors.at(id));
    return all;
  }
  /// The gradient of the loss, or of all that leaves the stage.
  Tensors roots() const {
    Tensors gradients;
    for (const ValueId id : reference.values().backwards.at(0).roots) {
      gradients.push_back(numbers(graph.values[static_cast<size_t>(id)].spec.sizes, 0.5));
    }
    return gradients;
  }

  const Graph graph;
  const Plan plan;
  AutogradStage reference;
  std::map<ValueId, at::Tensor> tensors;  // parameters, buffers and constants
  const std::function<void()> progress{};
  const OperatorTimer timer{};
};

/// linear first -> linear fc -> leaky_relu, times its input -> sum.
struct TwoLayers {
  static constexpr int64_t kRows = 96, kWidth = 32;
  GraphBuilder g;
  ValueId x = g.input({kRows, kWidth}), hidden = g.linear(x, "first", kWidth), fc = g.linear(hidden, "fc", kWidth);
  ValueId active = call(g, "aten::leaky_relu", {fc}, {0.1});
  ValueId loss = loss_of(g, mul(g, active, fc));
  Graph graph = g.build(loss);
  static at::Tensor input(double begin) { return numbers({kRows, kWidth}, begin); }
};

/// The second of its two stages, whose input is trained.
inline WatchedStage second_of_two() { return WatchedStage(TwoLayers().graph, 2, {{"first", 0}, {"fc", 1}}, 1); }

}  // namespace smp::runtime::stage_graphs
