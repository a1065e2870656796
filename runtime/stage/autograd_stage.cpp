// Gradients of inputs end in one node of ours, so that they keep the layout autograd gave them and arrive whole: no
// AccumulateGrad, which would re-stride them to the leaf's layout.
#include "runtime/stage/autograd_stage.h"

#include <c10/core/AutogradState.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "runtime/capture/interceptor.h"
#include "runtime/stage/gradient_sum.h"

namespace smp::runtime {

using namespace partitioner;

namespace {

// What the engine runs while it lives.
class OnThisThread {
 public:
  OnThisThread() { set(false); }
  ~OnThisThread() { set(before_); }
  OnThisThread(const OnThisThread&) = delete;
  OnThisThread& operator=(const OnThisThread&) = delete;

 private:
  static void set(bool takes_others) { c10::AutogradState::get_tls_state().set_multithreading_enabled(takes_others); }
  bool before_ = c10::AutogradState::get_tls_state().get_multithreading_enabled();
};

// In the place of a parameter's AccumulateGrad, and run as early as that: shows the gradient before it is added.
struct WatchedGradient : torch::autograd::Node {
  WatchedGradient() : Node(/*sequence_nr=*/std::numeric_limits<uint64_t>::max()) {}
  at::Tensor parameter;
  ValueId value = kNoValue;
  StageWatcher* watcher = nullptr;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override {
    at::Tensor gradient = std::move(inputs.at(0));
    inputs.clear();
    if (!gradient.defined()) return {};
    const c10::impl::ExcludeDispatchKeyGuard unseen(kCaptureKey);
    if (watcher->gradient_made(value, gradient)) add_to_grad(parameter, std::move(gradient));
    return {};
  }
  std::string name() const override { return "smp::WatchedGradient"; }
};

std::vector<ValueId> kept(const StageValues& values) {
  std::vector<ValueId> all = values.outputs;
  for (const BackwardValues& backward : values.backwards) {
    all.insert(all.end(), backward.roots.begin(), backward.roots.end());
  }
  return all;
}

}  // namespace

AutogradStage::AutogradStage(const Graph& graph, const Plan& plan, int stage, StageOptions options)
    : values_(stage_values(graph, plan, stage)),
      options_(std::move(options)),
      replay_(graph, plan.stages[static_cast<size_t>(stage)].nodes, kept(values_)) {
  for (ValueId id : values_.inputs) {
    // A tensor recorded without gradient may get one by a write in place; then the plan relays it.
    entries_.push_back({id, graph.values[static_cast<size_t>(id)].spec.requires_grad || leaves(id)});
  }
  for (ValueId id : replay_.external()) {
    if (std::binary_search(values_.inputs.begin(), values_.inputs.end(), id)) continue;
    own_tensors_.push_back({id, leaves(id)});
  }
  for (const BackwardValues& backward : values_.backwards) {
    std::vector<size_t> positions;
    for (ValueId id : backward.results) positions.push_back(entry_of(id, stage));
    result_entries_.push_back(std::move(positions));
  }
}

std::vector<ValueId> AutogradStage::own_values() const {
  std::vector<ValueId> values;
  for (const Entry& own : own_tensors_) values.push_back(own.value);
  return values;
}

std::vector<at::Tensor> AutogradStage::forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                               const TensorLookup& tensors, StageWatcher* watcher) {
  Slots slots(replay_.num_slots());
  InFlight flight;
  flight.watcher = watcher;
  flight.edges.resize(entries_.size() + own_tensors_.size(), 0);
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (entries_[i].needs_gradient) attach(inputs[i], i, flight);
    if (watcher != nullptr) watcher->entered(values_.inputs[i], inputs[i]);
    const int slot = replay_.slot_of(values_.inputs[i]);
    if (slot >= 0) slots[static_cast<size_t>(slot)] = inputs[i];
  }
  for (size_t i = 0; i < own_tensors_.size(); ++i) {
    slots[static_cast<size_t>(replay_.slot_of(own_tensors_[i].value))] = own_tensor(i, tensors, flight);
  }
  {
    std::optional<UserRandomStateScope> user_state;  // saving and restoring costs 3 us
    if (replay_.has_random()) user_state.emplace();
    flight.overwritten = replay_.run(slots, context, options_.progress, watcher);
  }
  if (values_.has_backward) {
    for (const BackwardValues& backward : values_.backwards) {
      auto& roots = flight.roots.emplace_back();
      for (ValueId id : backward.roots) roots.push_back(slots[static_cast<size_t>(replay_.slot_of(id))]);
    }
    in_flight_.emplace(context.microbatch, std::move(flight));
  }
  std::vector<at::Tensor> outputs;
  for (ValueId id : values_.outputs) outputs.push_back(slots[static_cast<size_t>(replay_.slot_of(id))]);
  return outputs;
}

at::Tensor AutogradStage::own_tensor(size_t i, const TensorLookup& tensors, InFlight& flight) const {
  at::Tensor tensor = tensors(own_tensors_[i].value);
  if (own_tensors_[i].needs_gradient) {
    attach(tensor, entries_.size() + i, flight);
  } else if (flight.watcher != nullptr && values_.has_backward && tensor.requires_grad()) {
    auto node = make_node<WatchedGradient>();
    node->parameter = tensor;
    node->value = own_tensors_[i].value;
    node->watcher = flight.watcher;
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, node);
  }
  if (flight.watcher != nullptr) flight.watcher->entered(own_tensors_[i].value, tensor);
  return tensor;
}

std::vector<at::Tensor> AutogradStage::backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) {
  // The table may hold a backward that no gradient reaches, and other stages may wait for its results.
  if (!values_.has_backward) return std::vector<at::Tensor>(values_.backwards[index].results.size());
  auto flight_at = in_flight_.find(microbatch);
  TORCH_INTERNAL_ASSERT(flight_at != in_flight_.end(), "backward of microbatch ", microbatch, " without its forward");
  const bool is_last = index + 1 == values_.backwards.size();
  InFlight own;
  if (is_last) {
    own = std::move(flight_at->second);
    in_flight_.erase(flight_at);
  }
  InFlight& flight = is_last ? own : flight_at->second;
  std::vector<at::Tensor> root_tensors = std::move(flight.roots[index]);
  if (is_last) flight.roots.clear();
  torch::autograd::edge_list roots;
  torch::autograd::variable_list root_gradients;
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (!gradients[i].defined() || !root_tensors[i].requires_grad()) continue;
    torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(root_tensors[i]);
    if (!edge.is_valid()) continue;  // a view made without gradients, of a tensor that requires one
    roots.push_back(std::move(edge));
    root_gradients.push_back(std::move(gradients[i]));
  }
  root_tensors.clear();
  if (!roots.empty()) {
    const auto run_engine = [&] {
      // On this thread, as a backward on the CPU runs: ranks that are threads would share the engine's thread of the device,
      // and hooks would run there.
      const OnThisThread on_this_thread;
      // A later backward of the body may pass through the same operators, which the first would free.
      torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, /*keep_graph=*/!is_last,
                                                            /*create_graph=*/false, /*accumulate_grad=*/true);
    };
    try {
      flight.watcher == nullptr ? run_engine() : flight.watcher->run_backward(run_engine);
    } catch (c10::Error& error) {
      if (!flight.overwritten.empty()) error.add_context(flight.overwritten);
      throw;
    }
  }
  return take_results(flight, index);
}

bool AutogradStage::leaves(ValueId id) const {
  return std::any_of(values_.backwards.begin(), values_.backwards.end(), [id](const BackwardValues& backward) {
    return std::binary_search(backward.results.begin(), backward.results.end(), id);
  });
}

// Position among the inputs, or behind them among the own tensors.
size_t AutogradStage::entry_of(ValueId id, int stage) const {
  const auto is_id = [id](const Entry& entry) { return entry.value == id; };
  const auto input = std::find_if(entries_.begin(), entries_.end(), is_id);
  if (input != entries_.end()) return static_cast<size_t>(input - entries_.begin());
  const auto own = std::find_if(own_tensors_.begin(), own_tensors_.end(), is_id);
  TORCH_INTERNAL_ASSERT(own != own_tensors_.end(), "stage ", stage, " returns the gradient of value ", id,
                        ", which it does not read");
  return entries_.size() + static_cast<size_t>(own - own_tensors_.begin());
}

void AutogradStage::attach(at::Tensor& input, size_t entry, InFlight& flight) const {
  // Made before any operator of this forward, so that it runs after all of them in the backward.
  if (!flight.gradients) flight.gradients = make_node<InputGradients>();
  // Shares the data, so that a value of another stage of this rank keeps its own graph. One that was received has none.
  if (input.use_count() > 1 || !input.is_leaf()) input = input.detach();
  torch::autograd::set_history(input, flight.gradients);
  flight.edges[entry] = input.output_nr();
}

std::vector<at::Tensor> AutogradStage::take_results(InFlight& flight, size_t index) const {
  std::vector<at::Tensor> came;
  if (flight.gradients) came = std::move(flight.gradients->gradients);
  std::vector<at::Tensor> results;
  for (size_t entry : result_entries_[index]) {
    results.push_back(came.empty() ? at::Tensor() : came[flight.edges[entry]]);
  }
  if (flight.gradients) flight.gradients->gradients.clear();
  return results;
}

std::unique_ptr<Stage> make_autograd_stage(const Graph& graph, const Plan& plan, int stage, StageOptions options) {
  return std::make_unique<AutogradStage>(graph, plan, stage, std::move(options));
}

}  // namespace smp::runtime
