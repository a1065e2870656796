// Offers are named "parameter/field"; the groups travel as one tensor of bytes.
#include "smp/engine/optimizers/optimizer_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <set>
#include <sstream>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "runtime/exchange/state_exchange.h"
#include "runtime/exchange/wire.h"
#include "runtime/libtorch/unmade.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/optimizer_settings.h"

namespace smp::engine {

namespace {

// No name of a parameter has a blank.
constexpr const char* kGroupsOffer = "smp groups";

double exact_number(std::string_view text) {
  double value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(read.ec == std::errc() && read.ptr == text.data() + text.size(),
                    "optimizer state: expected a number, got '", std::string(text), "'.");
  return value;
}

const std::string& name_of(const Model& model, const at::Tensor& parameter) {
  const runtime::NamedTensor* named = model.own.find(parameter);
  TORCH_CHECK_VALUE(named != nullptr, "optimizer state: expected an optimizer over parameters of the model, got one of ",
                    parameter.sizes(), " that the model does not have. Make the optimizer from net->parameters().");
  return named->name;
}

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const OptimizerGroup& group : optimizer.view->groups()) {
    all.insert(all.end(), group.parameters.begin(), group.parameters.end());
  }
  return all;
}

OptimizerState without_entries(const Optimizer& optimizer) {
  OptimizerState state{.kind = optimizer.view->state()->kind(), .groups = {}, .entries = {}};
  for (const OptimizerGroup& group : optimizer.view->groups()) {
    OptimizerState::Group& made = state.groups.emplace_back();
    made.options = group.options;
    for (const at::Tensor& parameter : group.parameters) made.parameters.push_back(name_of(*optimizer.model, parameter));
  }
  return state;
}

std::map<std::string, at::Tensor> offered(const OptimizerState& state, std::string& error) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [parameter, fields] : state.entries) {
    for (const auto& [field, tensor] : fields) {
      const bool is_plain = runtime::is_within_reach(tensor) && tensor.layout() == at::kStrided;
      if (!is_plain && error.empty()) {
        error = "expected dense CPU tensors, got another one for '" + field + "' of '" + parameter + "'.";
      }
      if (is_plain) tensors.emplace(parameter + "/" + field, tensor.to(runtime::host().type));
    }
  }
  if (!error.empty()) return {};
  if (!state.kind.empty()) tensors.emplace(kGroupsOffer, runtime::tensor_of_bytes(groups_to_json(state)));
  return tensors;
}

runtime::StateExchange exchange_of(const RankState& own, const OptimizerState& state) {
  std::string error;
  auto tensors = offered(state, error);
  return {std::move(tensors), error, own.context.pipeline, own.context.replicas};
}

}  // namespace

std::string groups_to_json(const OptimizerState& state) {
  boost::json::array groups;
  for (const OptimizerState::Group& group : state.groups) {
    boost::json::object options;
    for (const auto& [name, value] : group.options) options[name] = exact_text(value);
    boost::json::array parameters(group.parameters.begin(), group.parameters.end());
    groups.push_back(boost::json::object{{"options", std::move(options)}, {"parameters", std::move(parameters)}});
  }
  return boost::json::serialize(boost::json::object{{"kind", state.kind}, {"groups", std::move(groups)}});
}

void groups_from_json(const std::string& json, OptimizerState& state) {
  try {
    boost::json::parse_options options;
    options.max_depth = 4;              // groups, group, options, number
    options.allow_invalid_utf8 = true;  // names may be any bytes
    const boost::json::value read = boost::json::parse(json, {}, options);
    state.kind = std::string(read.at("kind").as_string());
    state.groups.clear();
    for (const boost::json::value& group : read.at("groups").as_array()) {
      OptimizerState::Group& made = state.groups.emplace_back();
      for (const auto& option : group.at("options").as_object()) {
        made.options[option.key()] = exact_number(option.value().as_string());
      }
      for (const auto& name : group.at("parameters").as_array()) made.parameters.emplace_back(std::string(name.as_string()));
    }
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {  // of Boost.JSON: no JSON, a missing key, another type
    TORCH_CHECK_VALUE(false, "optimizer state: expected kind and groups of an optimizer, got text that has none (",
                      error.what(), ").");
  }
}

StateView& known_state(const Optimizer& optimizer, const char* caller) {
  StateView* state = optimizer.view->state();
  TORCH_CHECK_VALUE(state != nullptr, caller, ": ", optimizer.view->refusal());
  return *state;
}

OptimizerState local_state(const RankState& own, const Optimizer& optimizer) {
  const StateView& view = known_state(optimizer, "DistributedOptimizer::local_state_dict");
  OptimizerState state = without_entries(optimizer);
  state.is_partial = true;
  for (const at::Tensor& parameter : parameters_of(optimizer)) {
    auto fields = view.of(parameter);
    if (!fields || !own.models.is_here(parameter)) continue;
    for (auto& [name, tensor] : *fields) tensor = tensor.to(runtime::host().type);
    state.entries[name_of(*optimizer.model, parameter)] = std::move(*fields);
  }
  return state;
}

void forget_state_of_others(const RankState& own, Optimizer& optimizer) {
  for (const at::Tensor& parameter : parameters_of(optimizer)) {
    if (!own.models.is_here(parameter)) optimizer.view->erase_state(parameter);
  }
}

void keep_local_state(const RankState& own, Optimizer& optimizer) {
  forget_state_of_others(own, optimizer);
  StateView* view = optimizer.view->state();
  if (view == nullptr) return;
  const std::vector<at::Tensor> parameters = parameters_of(optimizer);
  std::vector<at::Tensor> kept;
  for (const at::Tensor& parameter : parameters) {
    for (const auto& [name, tensor] : view->of(parameter).value_or(StateFields())) kept.push_back(tensor);
  }
  {
    const runtime::GeneratorHold hold;
    runtime::make_values(kept);
  }
  if (runtime::this_ranks_device().type == runtime::host().type) return;
  for (const at::Tensor& parameter : parameters) {  // made, or loaded, before the parameters have moved
    if (const auto fields = view->of(parameter)) view->set(parameter, *fields);
  }
}

// Names at once, data one tensor at a time, since all may be more than a message can be.
OptimizerEntries gathered_entries(const OptimizerEntries& own, runtime::Transport& group) {
  runtime::WireWriter names;
  for (const auto& [parameter, fields] : own) {
    for (const auto& [field, tensor] : fields) names.put(parameter), names.put(field);
  }
  const std::vector<std::string> all = group.all_gather(names.take());
  OptimizerEntries entries;
  for (int rank = 0; rank < group.size(); ++rank) {
    runtime::read_all(all[static_cast<size_t>(rank)], "names of an optimizer's state", [&](runtime::WireReader& in) {
      while (!in.at_end()) {
        const std::string parameter = in.get_string(), field = in.get_string();
        const at::Tensor mine = rank == group.rank() ? own.at(parameter).at(field) : at::Tensor();
        entries[parameter][field] = runtime::copy_on_all(mine, rank, group, "state of an optimizer");
      }
    });
  }
  return entries;
}

OptimizerState gathered_state(const RankState& own, const Optimizer& optimizer) {
  runtime::Transport& pipeline = *own.context.pipeline;
  OptimizerState state;
  std::string refused;  // on this rank alone, while the others go on
  try {
    state = local_state(own, optimizer);
  } catch (const c10::ValueError& error) {
    refused = error.what_without_backtrace();
  }
  for (const std::string& text : pipeline.all_gather(refused)) TORCH_CHECK_VALUE(text.empty(), text);
  state.is_partial = false;
  for (const at::Tensor& parameter : parameters_of(optimizer)) {
    const bool is_owner = own.models.home(parameter).owner() == pipeline.rank();
    if (!is_owner) state.entries.erase(name_of(*optimizer.model, parameter));
  }
  state.entries = gathered_entries(state.entries, pipeline);
  return state;
}

void broadcast_local_state(const RankState& own, Optimizer& optimizer, int source) {
  const at::NoGradGuard no_grad;
  runtime::Transport& replicas = *own.context.replicas;
  StateView& view = known_state(optimizer, "smp::join");
  OptimizerState state;
  if (replicas.rank() == source) state = local_state(own, optimizer);
  const auto texts = replicas.all_gather(replicas.rank() == source ? groups_to_json(state) : "");
  state.entries = gathered_entries(state.entries, replicas);
  if (replicas.rank() == source) return;
  groups_from_json(texts[static_cast<size_t>(source)], state);
  const std::vector<OptimizerGroup> groups = optimizer.view->groups();
  TORCH_CHECK_VALUE(state.groups.size() == groups.size(), "smp::join: expected ", groups.size(),
                    " parameter groups as here, got ", state.groups.size(), " from replica ", source,
                    ". Make the optimizer alike on every rank.");
  for (size_t g = 0; g < groups.size(); ++g) {
    view.set_options(g, state.groups[g].options);
    for (const at::Tensor& parameter : groups[g].parameters) {
      optimizer.view->erase_state(parameter);
      const auto entry = state.entries.find(name_of(*optimizer.model, parameter));
      if (entry != state.entries.end()) view.set(parameter, entry->second);
    }
  }
}

std::shared_ptr<OptimizerLoad> checked_load(RankState& own, Optimizer& optimizer, const OptimizerState& state) {
  const char* caller = "DistributedOptimizer::load_state_dict";
  refuse_in_body(caller);
  refuse_in_join(caller);
  known_state(optimizer, caller);
  return in_call(own.context, "load_state_dict of an optimizer", runtime::GroupKind::kWorld,
                 [&] { return std::make_shared<OptimizerLoad>(own, optimizer, state); });
}

void apply_load(RankState& own, Optimizer& optimizer, std::shared_ptr<OptimizerLoad> load) {
  optimizer.pending = std::move(load);
  optimizer.pending->apply_options();
  // Before the first step every rank holds every parameter, and waits to take over the state of its own alone. The groups
  // that the load has come through end with the step that decides the layout.
  const bool waits = own.context.is_laid_out && !optimizer.model->is_partitioned() && !optimizer.loads_at_once;
  if (!waits) take_over_loaded(own, optimizer);
}

void take_over_loaded(const RankState& own, Optimizer& optimizer) {
  if (optimizer.pending == nullptr) return;
  in_call(own.context, "taking over of an optimizer's loaded state", runtime::GroupKind::kWorld,
          [&] { std::exchange(optimizer.pending, nullptr)->apply_state(own.models); });
}

OptimizerLoad::OptimizerLoad(RankState& own, Optimizer& optimizer, const OptimizerState& state)
    : optimizer_(optimizer), view_(*optimizer.view->state()), exchange_(exchange_of(own, state)) {
  const char* caller = "DistributedOptimizer::load_state_dict: ";
  TORCH_CHECK_VALUE(exchange_.error().empty(), caller, exchange_.error());
  TORCH_CHECK_VALUE(exchange_.offers().contains(kGroupsOffer), caller,
                    "expected the state of an optimizer, got an empty one on every rank.");
  const at::Tensor bytes = exchange_.deliver(kGroupsOffer, runtime::TensorHome::on_all(own.context.pipeline->size()));
  groups_from_json(std::string(runtime::bytes_of(bytes)), groups_);
  const std::string text = difference(without_entries(optimizer));
  TORCH_CHECK_VALUE(text.empty(), caller, text, " Load the state of the same optimizer over the same model.");
}

std::string OptimizerLoad::difference(const OptimizerState& want) const {
  if (groups_.kind != want.kind) return "expected the state of " + want.kind + ", got that of " + groups_.kind + ".";
  if (groups_.groups.size() != want.groups.size()) {
    return "expected " + std::to_string(want.groups.size()) + " parameter groups, got " +
           std::to_string(groups_.groups.size()) + ".";
  }
  std::vector<std::string> wrong;
  std::set<std::string> known;
  const std::vector<OptimizerGroup> all = optimizer_.view->groups();
  for (size_t g = 0; g < want.groups.size(); ++g) {
    const OptimizerState::Group &got = groups_.groups[g], &own = want.groups[g];
    const auto same_key = [](const auto& a, const auto& b) { return a.first == b.first; };
    const bool same_options =
        std::equal(got.options.begin(), got.options.end(), own.options.begin(), own.options.end(), same_key);
    if (got.parameters != own.parameters || !same_options) {
      return "expected the parameters and options of group " + std::to_string(g) + ", got others.";
    }
    for (size_t p = 0; p < own.parameters.size(); ++p) {
      known.insert(own.parameters[p]);
      const std::string text = wrong_fields(own.parameters[p], all[g].parameters[p], got.options);
      if (!text.empty()) wrong.push_back(own.parameters[p] + ": " + text);
    }
  }
  for (const auto& [name, offer] : exchange_.offers()) {
    const size_t slash = name.rfind('/');
    if (slash != std::string::npos && !known.contains(name.substr(0, slash))) wrong.push_back(name + ": no such parameter");
  }
  return wrong.empty() ? "" : "expected a state that fits the parameters, got wrong ones: " + listed(wrong) + ".";
}

std::string OptimizerLoad::wrong_fields(const std::string& parameter, const at::Tensor& tensor,
                                        const OptionValues& options) const {
  std::string missing;
  size_t num_fields = 0;
  const StateRules rules = view_.rules(options).value();
  for (const auto& [field, is_count, is_needed] : rules.fields) {
    const auto offer = exchange_.offers().find(parameter + "/" + field);
    if (offer == exchange_.offers().end()) {
      if (is_needed && missing.empty()) missing = field;
      continue;
    }
    ++num_fields;
    const auto& [dtype, sizes, content, ranks] = offer->second;
    const bool fits =
        is_count ? dtype == at::kLong && sizes.empty() : dtype == tensor.scalar_type() && tensor.sizes().equals(sizes);
    std::ostringstream text;
    text << field << " is " << dtype << " " << at::IntArrayRef(sizes) << ", the parameter " << tensor.scalar_type() << " "
         << tensor.sizes();
    if (!fits) return text.str();
  }
  const std::string prefix = parameter + "/";
  for (auto at = exchange_.offers().lower_bound(prefix); at != exchange_.offers().end() && at->first.starts_with(prefix);
       ++at) {
    const std::string field = at->first.substr(prefix.size());
    const auto is_named = [&](const StateField& one) { return one.name == field; };
    if (std::none_of(rules.fields.begin(), rules.fields.end(), is_named)) return "unknown field " + field;
  }
  const bool may_be_absent = num_fields == 0 && rules.is_made_by_steps;
  return missing.empty() || may_be_absent ? "" : "missing field " + missing;
}

void OptimizerLoad::apply_options() {
  for (size_t g = 0; g < groups_.groups.size(); ++g) view_.set_options(g, groups_.groups[g].options);
}

void OptimizerLoad::apply_state(const Models& models) {
  const at::NoGradGuard no_grad;
  for (const OptimizerGroup& group : optimizer_.view->groups()) {
    const StateRules rules = view_.rules(group.options).value();
    for (const at::Tensor& parameter : group.parameters) {
      const std::string& name = name_of(*optimizer_.model, parameter);
      const runtime::TensorHome home = models.home(parameter);
      StateFields fields;
      bool has_state = false;
      for (const auto& [field, is_count, is_needed] : rules.fields) {
        if (!exchange_.offers().contains(name + "/" + field)) continue;
        const at::Tensor value = exchange_.deliver(name + "/" + field, home);
        has_state = true;
        if (value.defined()) fields[field] = at::empty_like(is_count ? value : parameter).copy_(value);
      }
      optimizer_.view->erase_state(parameter);
      if (has_state && models.is_here(parameter)) view_.set(parameter, fields);
    }
  }
}

}  // namespace smp::engine
