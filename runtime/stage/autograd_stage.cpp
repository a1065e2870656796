// A stage under autograd. Gradients of inputs end in one node of ours, so that they keep the layout autograd gave them
// and arrive whole: no AccumulateGrad, which would re-stride them to the leaf's layout (libtorch-facts C).
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <optional>

#include "runtime/stage/replay.h"
#include "runtime/stage/stage.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

// The producer of a stage's inputs as far as autograd knows: receives their gradients, whole, when all are there.
struct InputGradients : torch::autograd::Node {
  std::vector<at::Tensor> gradients;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& inputs) override {
    gradients = std::move(inputs);
    return {};
  }
  std::string name() const override { return "smp::InputGradients"; }
};

class AutogradStage : public Stage {
 public:
  AutogradStage(const Graph& graph, const Plan& plan, int stage, StageOptions options)
      : values_(stage_values(graph, plan, stage)),
        options_(std::move(options)),
        replay_(graph, plan.stages[stage].nodes, kept(values_)) {
    for (ValueId id : values_.inputs) {
      // A tensor recorded without gradient may get one by a write in place; then the plan relays it.
      const auto& results = values_.gradient_results;
      input_needs_gradient_.push_back(graph.values[id].spec.requires_grad ||
                                      std::binary_search(results.begin(), results.end(), id));
    }
    for (ValueId id : replay_.external()) {
      if (!std::binary_search(values_.inputs.begin(), values_.inputs.end(), id)) own_tensors_.push_back(id);
    }
    for (ValueId id : values_.gradient_results) {
      const auto at = std::lower_bound(values_.inputs.begin(), values_.inputs.end(), id);
      TORCH_INTERNAL_ASSERT(at != values_.inputs.end() && *at == id, "stage ", stage, " returns the gradient of value ",
                            id, ", which is none of its inputs");
      result_inputs_.push_back(static_cast<size_t>(at - values_.inputs.begin()));
    }
  }

  const StageValues& values() const override { return values_; }

  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors) override {
    Slots slots(replay_.num_slots());
    InFlight flight;
    flight.input_edges.resize(inputs.size(), 0);
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (input_needs_gradient_[i]) attach(inputs[i], i, flight);
      const int slot = replay_.slot_of(values_.inputs[i]);
      if (slot >= 0) slots[slot] = inputs[i];
    }
    for (ValueId id : own_tensors_) slots[replay_.slot_of(id)] = tensors(id);
    {
      std::optional<UserRandomStateScope> user_state;  // saving and restoring costs 3 us
      if (replay_.has_random()) user_state.emplace();
      replay_.run(slots, context, options_.progress);
    }
    if (values_.has_backward) {
      for (ValueId id : values_.gradient_roots) flight.roots.push_back(slots[replay_.slot_of(id)]);
      in_flight_.emplace(context.microbatch, std::move(flight));
    }
    std::vector<at::Tensor> outputs;
    for (ValueId id : values_.outputs) outputs.push_back(slots[replay_.slot_of(id)]);
    return outputs;
  }

  std::vector<at::Tensor> backward(int microbatch, std::vector<at::Tensor> gradients) override {
    if (!values_.has_backward) return {};  // the table may hold a backward that no gradient reaches
    auto flight_at = in_flight_.find(microbatch);
    TORCH_INTERNAL_ASSERT(flight_at != in_flight_.end(), "backward of microbatch ", microbatch, " without its forward");
    InFlight flight = std::move(flight_at->second);
    in_flight_.erase(flight_at);
    torch::autograd::edge_list roots;
    torch::autograd::variable_list root_gradients;
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined() || !flight.roots[i].requires_grad()) continue;
      roots.push_back(torch::autograd::impl::gradient_edge(flight.roots[i]));
      root_gradients.push_back(std::move(gradients[i]));
    }
    flight.roots.clear();
    if (!roots.empty()) {
      torch::autograd::Engine::get_default_engine().execute(roots, root_gradients, /*keep_graph=*/false,
                                                            /*create_graph=*/false, /*accumulate_grad=*/true);
    }
    std::vector<at::Tensor> results;
    for (size_t input : result_inputs_) {
      const bool came = flight.gradients && !flight.gradients->gradients.empty();
      results.push_back(came ? flight.gradients->gradients[flight.input_edges[input]] : at::Tensor());
    }
    return results;
  }

  void reset() override { in_flight_.clear(); }

 private:
  struct InFlight {
    std::shared_ptr<InputGradients> gradients;
    std::vector<uint32_t> input_edges;  // by input: its number at that node
    std::vector<at::Tensor> roots;      // by values_.gradient_roots
  };

  static std::vector<ValueId> kept(const StageValues& values) {
    std::vector<ValueId> all = values.outputs;
    all.insert(all.end(), values.gradient_roots.begin(), values.gradient_roots.end());
    return all;
  }

  void attach(at::Tensor& input, size_t position, InFlight& flight) const {
    // Made before any operator of this forward, so that it runs after all of them in the backward.
    if (!flight.gradients) {
      flight.gradients = std::shared_ptr<InputGradients>(new InputGradients, torch::autograd::deleteNode);
    }
    // Shares the data, so that a value of another stage of this rank keeps its own graph. One that was received has none.
    if (input.use_count() > 1 || !input.is_leaf()) input = input.detach();
    torch::autograd::set_history(input, flight.gradients);
    flight.input_edges[position] = input.output_nr();
  }

  StageValues values_;
  StageOptions options_;
  Replay replay_;
  std::vector<bool> input_needs_gradient_;
  std::vector<ValueId> own_tensors_;   // parameters, buffers, constants
  std::vector<size_t> result_inputs_;  // by gradient_results: position in inputs
  std::map<int, InFlight> in_flight_;
};

}  // namespace

std::unique_ptr<Stage> make_autograd_stage(const Graph& graph, const Plan& plan, int stage, StageOptions options) {
  return std::make_unique<AutogradStage>(graph, plan, stage, std::move(options));
}

}  // namespace smp::runtime
