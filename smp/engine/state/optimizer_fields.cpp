// One table row per field: adding an optimizer is one struct and one line in fields_of.
#include "smp/engine/state/optimizer_fields.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/Exception.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <charconv>

namespace smp::engine {
namespace {

using namespace torch::optim;

struct SgdTable {
  using Options = SGDOptions;
  using State = SGDParamState;
  static constexpr const char* kKind = "SGD";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("momentum", o.momentum()), visit("dampening", o.dampening());
    visit("weight_decay", o.weight_decay()), visit("nesterov", o.nesterov());
  }
  static void visit_state(State& s, auto&& visit) { visit("momentum_buffer", s.momentum_buffer()); }
  static std::vector<std::string> needed(const OptionValues& options) {
    return options.at("momentum") != 0 ? std::vector<std::string>{"momentum_buffer"}
                                       : std::vector<std::string>{};
  }
};

template <class AnyOptions, class AnyState>
struct AdamTable {
  using Options = AnyOptions;
  using State = AnyState;
  static constexpr const char* kKind = std::is_same_v<AnyOptions, AdamOptions> ? "Adam" : "AdamW";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("beta1", std::get<0>(o.betas())),
        visit("beta2", std::get<1>(o.betas()));
    visit("eps", o.eps()), visit("weight_decay", o.weight_decay()), visit("amsgrad", o.amsgrad());
  }
  static void visit_state(State& s, auto&& visit) {
    visit("step", s.step()), visit("exp_avg", s.exp_avg()), visit("exp_avg_sq", s.exp_avg_sq());
    visit("max_exp_avg_sq", s.max_exp_avg_sq());
  }
  static std::vector<std::string> needed(const OptionValues& options) {
    std::vector<std::string> names{"step", "exp_avg", "exp_avg_sq"};
    if (options.at("amsgrad") != 0) names.emplace_back("max_exp_avg_sq");
    return names;
  }
};

struct RmspropTable {
  using Options = RMSpropOptions;
  using State = RMSpropParamState;
  static constexpr const char* kKind = "RMSprop";
  static void visit_options(Options& o, auto&& visit) {
    visit("lr", o.lr()), visit("alpha", o.alpha()), visit("eps", o.eps()),
        visit("weight_decay", o.weight_decay());
    visit("momentum", o.momentum()), visit("centered", o.centered());
  }
  static void visit_state(State& s, auto&& visit) {
    visit("step", s.step()), visit("square_avg", s.square_avg()),
        visit("momentum_buffer", s.momentum_buffer());
    visit("grad_avg", s.grad_avg());
  }
  static std::vector<std::string> needed(const OptionValues& options) {
    std::vector<std::string> names{"step", "square_avg"};
    if (options.at("momentum") > 0) names.emplace_back("momentum_buffer");
    if (options.at("centered") != 0) names.emplace_back("grad_avg");
    return names;
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
  static void visit_state(State& s, auto&& visit) {
    visit("sum", s.sum()), visit("step", s.step());
  }
  static std::vector<std::string> needed(const OptionValues&) { return {"sum", "step"}; }
};

template <class Table>
class TableFields : public OptimizerFields {
  using Options = typename Table::Options;
  using State = typename Table::State;

 public:
  std::string kind() const override { return Table::kKind; }
  OptionValues options(const OptimizerOptions& options) const override {
    OptionValues values;
    Options copy = static_cast<const Options&>(options);
    Table::visit_options(
        copy, [&](const char* name, auto& value) { values[name] = static_cast<double>(value); });
    return values;
  }
  void set_options(OptimizerOptions& options, const OptionValues& values) const override {
    Table::visit_options(static_cast<Options&>(options), [&](const char* name, auto& value) {
      value = static_cast<std::remove_reference_t<decltype(value)>>(values.at(name));
    });
  }
  StateFields fields(OptimizerParamState& state) const override {
    StateFields fields;
    Table::visit_state(static_cast<State&>(state), [&](const char* name, auto& value) {
      if constexpr (std::is_same_v<std::remove_reference_t<decltype(value)>, int64_t>) {
        fields[name] = at::scalar_tensor(value, at::TensorOptions().dtype(at::kLong));
      } else if (value.defined()) {
        fields[name] = value.detach();
      }
    });
    return fields;
  }
  std::unique_ptr<OptimizerParamState> make_state(const StateFields& fields) const override {
    auto state = std::make_unique<State>();
    Table::visit_state(*state, [&](const char* name, auto& value) {
      const auto found = fields.find(name);
      if (found == fields.end()) return;
      if constexpr (std::is_same_v<std::remove_reference_t<decltype(value)>, int64_t>) {
        value = found->second.template item<int64_t>();
      } else {
        value = found->second;
      }
    });
    return state;
  }
  std::vector<std::string> known() const override {
    std::vector<std::string> names;
    State state;
    Table::visit_state(state, [&](const char* name, auto&) { names.emplace_back(name); });
    return names;
  }
  std::vector<std::string> needed(const OptionValues& options) const override {
    return Table::needed(options);
  }
  bool makes_state() const override { return !std::is_same_v<Table, AdagradTable>; }
};

template <class Table>
const OptimizerFields& table() {
  static const TableFields<Table> fields;
  return fields;
}

}  // namespace

const OptimizerFields* find_fields(const Optimizer& optimizer) {
  if (dynamic_cast<const SGD*>(&optimizer)) return &table<SgdTable>();
  if (dynamic_cast<const Adam*>(&optimizer))
    return &table<AdamTable<AdamOptions, AdamParamState>>();
  if (dynamic_cast<const AdamW*>(&optimizer))
    return &table<AdamTable<AdamWOptions, AdamWParamState>>();
  if (dynamic_cast<const RMSprop*>(&optimizer)) return &table<RmspropTable>();
  if (dynamic_cast<const Adagrad*>(&optimizer)) return &table<AdagradTable>();
  return nullptr;
}

const OptimizerFields& fields_of(const Optimizer& optimizer, const std::string& caller) {
  const OptimizerFields* fields = find_fields(optimizer);
  TORCH_CHECK_VALUE(
      fields != nullptr, caller,
      ": expected SGD, Adam, AdamW, RMSprop or Adagrad of LibTorch, got another optimizer. ",
      "Save its state by the names of model.local_named_parameters().");
  return *fields;
}

std::string exact_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

}  // namespace smp::engine
