// A stage whose forward runs twice. No engine runs within another: a value that is used in a region and outside of it would
// add up its gradients in another order.
#include <c10/util/Exception.h>

#include <map>
#include <set>
#include <utility>

#include "runtime/stage/stage.h"

namespace smp::runtime {
namespace {

using namespace partitioner;

class RecomputingStage : public Stage {
 public:
  RecomputingStage(const Graph& graph, std::unique_ptr<Stage> stage) : graph_(graph), stage_(std::move(stage)) {
    for (const Node& node : graph.nodes) written_.insert(node.written_storages.begin(), node.written_storages.end());
  }

  const StageValues& values() const override { return stage_->values(); }

  StageReport report() const override {
    StageReport report = stage_->report();
    report.num_recomputed = num_recomputed_;
    return report;
  }

  std::vector<at::Tensor> forward(const MicrobatchContext& context, std::vector<at::Tensor> inputs,
                                  const TensorLookup& tensors) override {
    Flight flight{.context = context, .inputs = inputs, .own = {}};
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (is_written(values().inputs[i])) flight.inputs[i] = inputs[i].detach().clone();
    }
    auto outputs = stage_->forward(context, std::move(inputs), [&](ValueId id) {
      at::Tensor tensor = tensors(id);
      Own own{.tensor = tensor, .content = {}, .version = 0};
      is_written(id) ? void(own.content = tensor.detach().clone()) : void(own.version = version_of(tensor));
      flight.own.insert_or_assign(id, std::move(own));
      return tensor;
    });
    ++num_recomputed_;
    if (stage_->recomputes(context.microbatch)) return outputs;
    stage_->drop(context.microbatch);
    for (at::Tensor& output : outputs) output = output.detach();  // from what its operators have saved
    flights_.insert_or_assign(context.microbatch, std::move(flight));
    return outputs;
  }

  std::vector<at::Tensor> backward(int microbatch, size_t index, std::vector<at::Tensor> gradients) override {
    if (auto flight = flights_.extract(microbatch); !flight.empty()) run_again(std::move(flight.mapped()));
    return stage_->backward(microbatch, index, std::move(gradients));
  }

  void weight_gradients(int microbatch) override { stage_->weight_gradients(microbatch); }

  void drop(int microbatch) override {
    flights_.erase(microbatch);
    stage_->drop(microbatch);
  }

  void reset() override {
    flights_.clear();
    stage_->reset();
  }

 private:
  struct Own {
    at::Tensor tensor;
    at::Tensor content;  // before the forward; undefined: no operator of the graph writes to it
    int64_t version;     // where it has no content
  };
  struct Flight {
    MicrobatchContext context;
    std::vector<at::Tensor> inputs;
    std::map<ValueId, Own> own;
  };

  // Tensors of inference mode have none, and nobody can write to them where they are read for gradients.
  static int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

  bool is_written(ValueId id) const { return written_.contains(graph_.values[static_cast<size_t>(id)].storage); }

  void run_again(Flight flight) {
    std::vector<std::pair<at::Tensor, at::Tensor>> now;  // what is written, and its content
    for (const auto& [id, own] : flight.own) {
      if (own.content.defined()) {
        now.emplace_back(own.tensor, own.tensor.detach().clone());
      } else {
        TORCH_CHECK(version_of(own.tensor) == own.version,
                    "one of the tensors needed to recompute a forward has been modified by an "
                    "inplace operation: '",
                    graph_.values[static_cast<size_t>(id)].name, "' is at version ", version_of(own.tensor),
                    "; expected version ", own.version,
                    " instead. Write to it behind the step, or outside of what is checkpointed.");
      }
    }
    for (const auto& [id, own] : flight.own) {
      if (own.content.defined()) write(own.tensor, own.content);
    }
    stage_->forward(flight.context, std::move(flight.inputs), [&](ValueId id) { return flight.own.at(id).tensor; });
    for (const auto& [tensor, content] : now) write(tensor, content);
  }

  // Past the version, which the backwards of other microbatches compare.
  static void write(const at::Tensor& tensor, const at::Tensor& content) { tensor.variable_data().copy_(content); }

  const Graph& graph_;
  std::unique_ptr<Stage> stage_;
  std::set<int32_t> written_;  // storages, by any operator of the graph
  std::map<int, Flight> flights_;
  int64_t num_recomputed_ = 0;
};

}  // namespace

std::unique_ptr<Stage> make_recomputing_stage(const Graph& graph, std::unique_ptr<Stage> stage) {
  if (!stage->values().has_backward) return stage;
  return std::make_unique<RecomputingStage>(graph, std::move(stage));
}

}  // namespace smp::runtime
