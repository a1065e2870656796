// One struct per optimizer, read off torch/csrc/api/src/optim: adding one is a struct and a line in view_of. Each field of
// the state stands beside the option without which no step needs it, or none.
#include "smp/torch_optimizer_view.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "runtime/device/device.h"

namespace smp {
namespace {

using namespace torch::optim;
using engine::OptimizerMemory;
using engine::OptionValues;
using engine::StateFields;

struct SgdTable {
  using Options = SGDOptions;
  using State = SGDParamState;
  static constexpr const char* kKind = "SGD";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("momentum", o.momentum()), visit("dampening", o.dampening());
    visit("weight_decay", o.weight_decay()), visit("nesterov", o.nesterov());
  }
  static void visit_state(State& s, auto&& visit) { visit("momentum_buffer", s.momentum_buffer(), "momentum"); }
  static OptimizerMemory memory(const Options& o) {
    const double decayed = o.weight_decay() != 0, momentum = o.momentum() != 0;
    return {.state = momentum, .workspace = decayed + (o.nesterov() ? momentum : 0)};
  }
};

template <class AnyOptions, class AnyState>
struct AdamTable {
  using Options = AnyOptions;
  using State = AnyState;
  static constexpr const char* kKind = std::is_same_v<AnyOptions, AdamOptions> ? "Adam" : "AdamW";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("beta1", std::get<0>(o.betas())), visit("beta2", std::get<1>(o.betas()));
    visit("eps", o.eps()), visit("weight_decay", o.weight_decay()), visit("amsgrad", o.amsgrad());
  }
  static void visit_state(State& s, auto&& visit) {
    visit("step", s.step(), ""), visit("exp_avg", s.exp_avg(), ""), visit("exp_avg_sq", s.exp_avg_sq(), "");
    visit("max_exp_avg_sq", s.max_exp_avg_sq(), "amsgrad");
  }
  static OptimizerMemory memory(const Options& o) {
    const bool copies = std::is_same_v<AnyOptions, AdamOptions> && o.weight_decay() != 0;
    return {.state = o.amsgrad() ? 3.0 : 2.0, .workspace = copies ? 3.0 : 2.0};
  }
};

struct RmspropTable {
  using Options = RMSpropOptions;
  using State = RMSpropParamState;
  static constexpr const char* kKind = "RMSprop";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("alpha", o.alpha()), visit("eps", o.eps()), visit("weight_decay", o.weight_decay());
    visit("momentum", o.momentum()), visit("centered", o.centered());
  }
  static void visit_state(State& s, auto&& visit) {
    visit("step", s.step(), ""), visit("square_avg", s.square_avg(), "");
    visit("momentum_buffer", s.momentum_buffer(), "momentum"), visit("grad_avg", s.grad_avg(), "centered");
  }
  static OptimizerMemory memory(const Options& o) {
    return {.state = 1.0 + (o.momentum() > 0) + o.centered(), .workspace = o.weight_decay() != 0 ? 2.0 : 1.0};
  }
};

struct AdagradTable {
  using Options = AdagradOptions;
  using State = AdagradParamState;
  static constexpr const char* kKind = "Adagrad";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("lr_decay", o.lr_decay()), visit("weight_decay", o.weight_decay());
    visit("initial_accumulator_value", o.initial_accumulator_value()), visit("eps", o.eps());
  }
  static void visit_state(State& s, auto&& visit) { visit("sum", s.sum(), ""), visit("step", s.step(), ""); }
  static OptimizerMemory memory(const Options& o) { return {.state = 1, .workspace = o.weight_decay() != 0 ? 2.0 : 1.0}; }
};

/// An optimizer of the program's own.
class UnknownView : public engine::OptimizerView {
 public:
  explicit UnknownView(Optimizer& optimizer) : optimizer_(optimizer) {}

  bool is_elementwise() const override { return false; }
  OptimizerMemory memory() const override { return {.state = 2, .workspace = 3}; }  // as much as Adam
  std::vector<engine::OptimizerGroup> groups() const override {
    std::vector<engine::OptimizerGroup> groups;
    for (const auto& group : optimizer_.param_groups()) groups.push_back({group.params(), {}});
    return groups;
  }
  void erase_state(const at::Tensor& parameter) override { optimizer_.state().erase(parameter.unsafeGetTensorImpl()); }
  std::vector<at::Tensor> tensors_kept_for(const at::Tensor&) const override { return {}; }
  std::function<void()> snapshot() override {
    auto kept = std::make_shared<Kept>();
    for (const auto& group : optimizer_.param_groups()) kept->options.push_back(group.options().clone());
    for (const auto& [parameter, state] : optimizer_.state()) kept->states.emplace_back(parameter, copy_of(*state));
    return [this, kept] { put_back(*kept); };
  }
  engine::StateView* state() override { return nullptr; }
  std::string refusal() const override {
    return "expected SGD, Adam, AdamW, RMSprop or Adagrad of LibTorch, got another optimizer. Save its state by the names "
           "of model.local_named_parameters().";
  }

 protected:
  Optimizer& optimizer_;

 private:
  using State = std::unique_ptr<OptimizerParamState>;
  struct Kept {
    std::vector<std::unique_ptr<OptimizerOptions>> options;
    std::vector<std::pair<void*, State>> states;  // null: of a class that has no copies
  };

  static State copy_of(const OptimizerParamState& state) {
    try {
      return state.clone();
    } catch (const c10::Error&) {
      return nullptr;
    }
  }
  void put_back(Kept& kept) {
    for (size_t g = 0; g < kept.options.size(); ++g) {
      optimizer_.param_groups().at(g).set_options(std::move(kept.options[g]));
    }
    auto made = std::exchange(optimizer_.state(), {});
    for (auto& [parameter, state] : kept.states) {
      optimizer_.state()[parameter] = state ? std::move(state) : std::move(made[parameter]);
    }
  }
};

template <class Value>
constexpr bool is_count = std::is_same_v<std::remove_cvref_t<Value>, int64_t>;

template <class Table>
class KnownView : public UnknownView, public engine::StateView {
  using Options = typename Table::Options;
  using State = typename Table::State;

 public:
  KnownView(Optimizer& optimizer, bool is_elementwise) : UnknownView(optimizer), is_elementwise_(is_elementwise) {}

  bool is_elementwise() const override { return is_elementwise_; }
  OptimizerMemory memory() const override {
    OptimizerMemory largest;
    for (const auto& group : optimizer_.param_groups()) {
      const OptimizerMemory memory = Table::memory(static_cast<const Options&>(group.options()));
      largest = {std::max(largest.state, memory.state), std::max(largest.workspace, memory.workspace)};
    }
    return largest;
  }
  std::vector<engine::OptimizerGroup> groups() const override {
    std::vector<engine::OptimizerGroup> groups = UnknownView::groups();
    for (size_t g = 0; g < groups.size(); ++g) {
      Table::visit_options(static_cast<Options&>(optimizer_.param_groups()[g].options()),
                           [&](const char* name, auto& value) { groups[g].options[name] = static_cast<double>(value); });
    }
    return groups;
  }
  std::vector<at::Tensor> tensors_kept_for(const at::Tensor& parameter) const override {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    auto* known = found == optimizer_.state().end() ? nullptr : dynamic_cast<State*>(found->second.get());
    std::vector<at::Tensor> tensors;
    if (known == nullptr) return tensors;
    Table::visit_state(*known, [&](const char*, auto& value, const char*) {
      if constexpr (!is_count<decltype(value)>) tensors.push_back(value);
    });
    std::erase_if(tensors, [](const at::Tensor& tensor) { return !tensor.defined(); });
    return tensors;
  }
  StateView* state() override { return this; }
  std::string kind() const override { return Table::kKind; }
  void set_options(size_t group, const OptionValues& values) override {
    Table::visit_options(static_cast<Options&>(optimizer_.param_groups().at(group).options()),
                         [&](const char* name, auto& value) {
                           value = static_cast<std::remove_reference_t<decltype(value)>>(values.at(name));
                         });
  }
  std::optional<engine::StateRules> rules(const OptionValues& options) const override {
    engine::StateRules rules{.fields = {}, .is_made_by_steps = !std::is_same_v<Table, AdagradTable>};
    State state;
    Table::visit_state(state, [&](const std::string& name, auto& value, const std::string& option) {
      rules.fields.push_back({name, is_count<decltype(value)>, option.empty() || options.at(option) != 0});
    });
    return rules;
  }
  std::optional<StateFields> of(const at::Tensor& parameter) const override {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    if (found == optimizer_.state().end()) return std::nullopt;
    // An optimizer that is derived from a known one may keep a state of its own.
    auto* known = dynamic_cast<State*>(found->second.get());
    TORCH_CHECK_VALUE(known != nullptr, "DistributedOptimizer: ", refusal());
    StateFields fields;
    Table::visit_state(*known, [&](const char* name, auto& value, const char*) {
      if constexpr (is_count<decltype(value)>) {
        fields[name] = at::scalar_tensor(value, at::TensorOptions(runtime::host().type).dtype(at::kLong));
      } else if (value.defined()) {
        fields[name] = value.detach();
      }
    });
    return fields;
  }
  void set(const at::Tensor& parameter, const StateFields& fields) override {
    auto state = std::make_unique<State>();
    Table::visit_state(*state, [&](const char* name, auto& value, const char*) {
      const auto found = fields.find(name);
      if (found == fields.end()) return;
      if constexpr (is_count<decltype(value)>) {
        value = found->second.template item<int64_t>();
      } else {
        value = found->second.to(parameter.device());
      }
    });
    optimizer_.state().insert_or_assign(parameter.unsafeGetTensorImpl(), std::move(state));
  }

 private:
  bool is_elementwise_;  // LibTorch's own, whose step nobody has overridden
};

/// Null where `optimizer` is another one.
template <class Known, class Table>
std::unique_ptr<engine::OptimizerView> view_as(Optimizer& optimizer) {
  if (dynamic_cast<Known*>(&optimizer) == nullptr) return nullptr;
  return std::make_unique<KnownView<Table>>(optimizer, typeid(optimizer) == typeid(Known));
}

}  // namespace

std::unique_ptr<engine::OptimizerView> view_of(Optimizer& optimizer) {
  TORCH_CHECK_VALUE(
      dynamic_cast<const LBFGS*>(&optimizer) == nullptr,
      "DistributedOptimizer: expected an optimizer that updates each element by itself (SGD, Adam, AdamW, RMSprop, "
      "Adagrad), got LBFGS, whose steps mix all parameters and cannot be split over ranks. Use one of those.");
  constexpr std::array kKnown{view_as<SGD, SgdTable>, view_as<Adam, AdamTable<AdamOptions, AdamParamState>>,
                              view_as<AdamW, AdamTable<AdamWOptions, AdamWParamState>>, view_as<RMSprop, RmspropTable>,
                              view_as<Adagrad, AdagradTable>};
  for (const auto& view_as_known : kKnown) {
    if (auto view = view_as_known(optimizer)) return view;
  }
  return std::make_unique<UnknownView>(optimizer);
}

}  // namespace smp
