// The models of one rank: their tensors under one set of names, and which ranks hold them.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "partitioner/plan/plan.h"
#include "runtime/capture/bindings.h"
#include "runtime/exchange/state_exchange.h"
#include "runtime/gradients/gradient_reducer.h"
#include "runtime/placement/placement.h"
#include "smp/engine/context/context.h"
#include "smp/engine/context/hooks.h"
#include "smp/engine/model_view.h"

namespace smp::engine {

struct Program;

/// How a model's gradients are averaged over replicas.
struct Reduction {
  bool overlap = true;
  bool broadcasts_buffers = true;
  bool averages_microbatches = true;
  int64_t bucket_bytes = 0;
  bool by_messages = false;  // although replicas share memory: there was no room
  int64_t passes_per_step = 1;
  int64_t num_passes = 0;        // steps that kept the model's gradients for backward_passes_per_step; the leader's counts
  int num_no_sync = 0;           // guards alive
  bool keeps_gradients = false;  // of steps that the other replicas have not had
  CommHook hook{};
  int num_hooks = 0;                                    // registered so far
  std::unique_ptr<runtime::GradientReducer> reducer{};  // from the first step that averages

  /// number: the model's, so that the messages of several do not mix.
  runtime::ReducerOptions options(int number) const;
};

/// Where a training step has met a number that is not finite: the first is the nearest to the cause.
enum class NonfinitePlace : uint8_t { kLoss, kGradient, kMeanGradient, kGradientNorm, kNowhere };
constexpr NonfinitePlace last_of(NonfinitePlace) { return NonfinitePlace::kNowhere; }

struct NonfiniteNumber {
  NonfinitePlace place = NonfinitePlace::kNowhere;
  bool is_nan = false;  // else infinite; of kGradient not known
  int32_t rank = 0, microbatch = 0;
  std::string parameter{};
  uint64_t step = 0;  // in training step; does not travel
  bool exists() const { return place != NonfinitePlace::kNowhere; }
  static auto members(auto& self) { return std::tie(self.place, self.is_nan, self.rank, self.microbatch, self.parameter); }
};

/// What of a model's training was not finite.
struct NonfiniteState {
  NonfiniteNumber loss{};   // of this step, on this rank
  NonfiniteNumber known{};  // in the last step, or a loss since gradients were cleared, on all ranks alike
  bool is_loss = false;     // that one
  bool is_cleared = false;  // before this step: gradients here of one of its optimizers, all of them
};

/// What a program places of a model that it uses for the first time.
enum class Placement { kWholeModels, kUsedTensors };

/// One wrapped model.
struct Model {
  std::shared_ptr<const ModelView> view;
  int number = 0;         // of no other model that is alive, the same on all ranks
  std::string prefix;     // of its tensors in graphs, plans and homes: "generator."; "" for one without a name
  runtime::Bindings own;  // its tensors under the view's own names
  std::shared_ptr<const Program> first_program;  // that used it; null before
  std::shared_ptr<Hooks> hooks = std::make_shared<Hooks>();
  Reduction reduction{};
  bool is_alike = false;  // its values were the same on all ranks before it was placed
  std::vector<std::shared_ptr<runtime::StateExchange>> pending_loads{};  // oldest first; they wait for placement
  NonfiniteState nonfinite{};

  /// Whether a program has placed it.
  bool is_partitioned() const { return first_program != nullptr; }
};

/// Writes what `exchange` offers into the tensors of the model that somebody holds, by name. Collective over all ranks.
void load_tensors(runtime::StateExchange& exchange, const Model& model,
                  const std::function<runtime::TensorHome(const at::Tensor&)>& home_of);

/// Names are those of the view behind the model's prefix. Each model is placed as a whole by the first program that uses it.
class Models {
 public:
  explicit Models(Context& context) : context_(context) {}

  /// `name` empty: none for the first model, "model1", "model2", … for the others. Throws c10::ValueError for a name
  /// that another model has, that is no identifier, or that gives two tensors one name, and for a module that a model
  /// which is gone has spread over the pipeline.
  std::shared_ptr<Model> add(std::shared_ptr<const ModelView> view, const std::string& name);
  void remove(const Model& model);
  /// In the order in which they were made.
  const std::vector<std::shared_ptr<Model>>& all() const { return models_; }

  const runtime::Bindings& bindings() const { return bindings_; }
  /// Of tensors that are placed.
  const runtime::TensorHomes& homes() const { return homes_; }
  std::vector<std::string> module_paths() const;
  /// One letter per model: is it in training mode?
  std::string training_flags() const;

  bool is_placed(const at::Tensor& tensor) const;
  /// Whether this rank holds the tensor's data; every rank does before it is placed.
  bool is_here(const at::Tensor& tensor) const;
  bool is_placed_here(const at::Tensor& tensor) const { return is_placed(tensor) && is_here(tensor); }
  /// Names of tensors whose data some rank does not have, or not yet.
  std::set<std::string> placed_or_delayed() const;
  /// All pipeline ranks before it is placed.
  runtime::TensorHome home(const at::Tensor& tensor) const;

  /// Whether `graph` uses a model that is not placed.
  bool needs_placement(const partitioner::Graph& graph, const runtime::TensorHomes& placed) const;
  /// The models that place() would place for `graph`.
  std::vector<std::shared_ptr<Model>> to_place(const partitioner::Graph& graph) const;
  /// `placed` and what running `graph` as planned adds.
  runtime::TensorHomes homes_after(const partitioner::Graph& graph, const partitioner::Plan& plan,
                                   const runtime::TensorHomes& placed, Placement placement = Placement::kWholeModels) const;
  /// Models that are not placed get the values of world rank 0 on all ranks. Collective over the world, unless are_alike().
  void make_alike();
  bool are_alike() const;
  /// After a step: the program may give those that were not placed other values.
  void forget_alike();
  /// Places what `program` uses for the first time: tied tensors and replicas get equal values, the other ranks' data
  /// are released. Collective over the pipeline and the replicas.
  void place(const std::shared_ptr<const Program>& program, Placement placement);

 private:
  const std::string* name_of(const at::Tensor& tensor) const;
  /// Null: nowhere yet.
  const runtime::TensorHome* find_home(const at::Tensor& tensor) const;
  bool uses(const partitioner::Graph& graph, const Model& model) const;
  std::vector<runtime::NamedTensor> tensors_of_all() const;
  void bind_all();
  void move_to_device(const runtime::Bindings& bindings, const std::function<bool(const runtime::NamedTensor&)>& is_here);
  void follow_storages();
  void load_pending(const runtime::Bindings& fresh, const runtime::TensorHomes& homes);

  Context& context_;
  std::vector<std::shared_ptr<Model>> models_;
  int num_made_ = 0;
  runtime::Bindings bindings_;  // of all models
  runtime::TensorHomes homes_;
};

}  // namespace smp::engine
