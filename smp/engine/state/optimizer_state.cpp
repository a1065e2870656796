// Offers are named "parameter/field"; the groups travel as one tensor of bytes.
#include "smp/engine/state/optimizer_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <cstring>
#include <numeric>
#include <set>
#include <sstream>

#include "runtime/exchange/wire.h"
#include "smp/engine/state/model_state.h"

namespace smp::engine {

using torch::optim::Optimizer;

namespace {

// No name of a parameter has a blank.
constexpr const char* kGroups = "smp groups";

double exact_number(std::string_view text) {
  double value = 0;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(read.ec == std::errc() && read.ptr == text.data() + text.size(),
                    "optimizer state: expected a number, got '", std::string(text), "'.");
  return value;
}

const std::string& name_of(const Model& model, const at::Tensor& parameter) {
  const runtime::NamedTensor* named = model.own.find(parameter);
  TORCH_CHECK_VALUE(
      named != nullptr,
      "optimizer state: expected an optimizer over parameters of the model, got one of ",
      parameter.sizes(),
      " that the model does not have. Make the optimizer from net->parameters().");
  return named->name;
}

OptimizerState without_entries(const Model& model, const Optimizer& optimizer,
                               const OptimizerFields& fields) {
  OptimizerState state{.kind = fields.kind(), .groups = {}, .entries = {}};
  for (const auto& group : optimizer.param_groups()) {
    OptimizerState::Group& made = state.groups.emplace_back();
    made.options = fields.options(group.options());
    for (const at::Tensor& parameter : group.params())
      made.parameters.push_back(name_of(model, parameter));
  }
  return state;
}

void read_entries(runtime::WireReader& in, OptimizerState& state) {
  while (!in.at_end()) {
    const std::string parameter = in.get_string(), field = in.get_string();
    state.entries[parameter][field] = in.get_tensor();
  }
}

at::Tensor to_tensor(const std::string& text) {
  at::Tensor bytes =
      at::empty({static_cast<int64_t>(text.size())}, at::TensorOptions().dtype(at::kByte));
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::map<std::string, at::Tensor> offered(const OptimizerState& state, std::string& error) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& [parameter, fields] : state.entries) {
    for (const auto& [field, tensor] : fields) {
      const bool is_plain = tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided;
      if (!is_plain && error.empty()) {
        error = "expected dense CPU tensors, got another one for '" + field + "' of '" + parameter +
                "'.";
      }
      if (is_plain) tensors.emplace(parameter + "/" + field, tensor);
    }
  }
  if (!error.empty()) return {};
  if (!state.kind.empty()) tensors.emplace(kGroups, to_tensor(groups_to_json(state)));
  return tensors;
}

runtime::StateExchange exchange_of(const Conductor& own, const OptimizerState& state,
                                   std::string own_error) {
  auto tensors = offered(state, own_error);
  return {std::move(tensors), std::move(own_error), *own.context().pipeline,
          *own.context().replicas};
}

std::vector<int> all_ranks(const Conductor& own) {
  std::vector<int> all(static_cast<size_t>(own.context().pipeline->size()));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

std::string groups_to_json(const OptimizerState& state) {
  boost::json::array groups;
  for (const OptimizerState::Group& group : state.groups) {
    boost::json::object options;
    for (const auto& [name, value] : group.options) options[name] = exact_text(value);
    boost::json::array parameters(group.parameters.begin(), group.parameters.end());
    groups.push_back(boost::json::object{{"options", std::move(options)},
                                         {"parameters", std::move(parameters)}});
  }
  return boost::json::serialize(
      boost::json::object{{"kind", state.kind}, {"groups", std::move(groups)}});
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
      for (const auto& name : group.at("parameters").as_array())
        made.parameters.emplace_back(std::string(name.as_string()));
    }
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {  // of Boost.JSON: no JSON, a missing key, another type
    TORCH_CHECK_VALUE(
        false,
        "optimizer state: expected kind and groups of an optimizer, got text that has none (",
        error.what(), ").");
  }
}

OptimizerState local_state(const Conductor& own, const Model& model, Optimizer& optimizer) {
  const OptimizerFields& fields = fields_of(optimizer, "DistributedOptimizer::local_state_dict");
  OptimizerState state = without_entries(model, optimizer, fields);
  state.is_partial = true;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      const std::string& name = name_of(model, parameter);
      if (found != optimizer.state().end() && own.models().is_here(parameter))
        state.entries[name] = fields.fields(*found->second);
    }
  }
  return state;
}

OptimizerState gathered_state(const Conductor& own, const Model& model, Optimizer& optimizer) {
  OptimizerState state = local_state(own, model, optimizer);
  state.is_partial = false;
  runtime::WireWriter out;
  const int me = own.context().pipeline->rank();
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto entry = state.entries.find(name_of(model, parameter));
      if (entry == state.entries.end() || own.models().owner(parameter) != me) continue;
      for (const auto& [field, tensor] : entry->second) {
        out.put(entry->first), out.put(field);
        out.put(tensor);
      }
    }
  }
  state.entries.clear();
  for (const std::string& bytes : own.context().pipeline->all_gather(out.take())) {
    runtime::read_all(bytes, "state of an optimizer", [&](runtime::WireReader& in) { read_entries(in, state); });
  }
  return state;
}

void broadcast_local_state(Conductor& own, const Model& model, Optimizer& optimizer, int source) {
  const at::NoGradGuard no_grad;
  runtime::Transport& replicas = *own.context().replicas;
  const OptimizerFields& optimizer_fields = fields_of(optimizer, "smp::join");
  runtime::WireWriter out;
  if (replicas.rank() == source) {
    const OptimizerState state = local_state(own, model, optimizer);
    out.put(groups_to_json(state));
    for (const auto& [parameter, fields] : state.entries) {
      for (const auto& [field, tensor] : fields) {
        out.put(parameter), out.put(field);
        out.put(tensor);
      }
    }
  }
  const std::vector<std::string> all = replicas.all_gather(out.take());
  if (replicas.rank() == source) return;
  OptimizerState state;
  runtime::read_all(all[static_cast<size_t>(source)], "state of an optimizer", [&](runtime::WireReader& in) {
    groups_from_json(in.get_string(), state);
    read_entries(in, state);
  });
  TORCH_CHECK_VALUE(state.groups.size() == optimizer.param_groups().size(), "smp::join: expected ",
                    optimizer.param_groups().size(), " parameter groups as here, got ", state.groups.size(), " from replica ",
                    source, ". Make the optimizer alike on every rank.");
  for (size_t g = 0; g < state.groups.size(); ++g) {
    auto& group = optimizer.param_groups()[g];
    optimizer_fields.set_options(group.options(), state.groups[g].options);
    for (const at::Tensor& parameter : group.params()) {
      void* key = parameter.unsafeGetTensorImpl();
      optimizer.state().erase(key);
      const auto entry = state.entries.find(name_of(model, parameter));
      if (entry != state.entries.end()) optimizer.state()[key] = optimizer_fields.make_state(entry->second);
    }
  }
}

OptimizerLoad::OptimizerLoad(Conductor& own, const Model& model, Optimizer& optimizer,
                             const OptimizerState& state, std::string own_error)
    : own_(own),
      model_(model),
      optimizer_(optimizer),
      fields_(fields_of(optimizer, "DistributedOptimizer::load_state_dict")),
      exchange_(exchange_of(own, state, std::move(own_error))) {
  const char* caller = "DistributedOptimizer::load_state_dict: ";
  TORCH_CHECK_VALUE(exchange_.error().empty(), caller, exchange_.error());
  TORCH_CHECK_VALUE(exchange_.offers().contains(kGroups), caller,
                    "expected the state of an optimizer, got an empty one on every rank.");
  const at::Tensor bytes = exchange_.deliver(kGroups, all_ranks(own));
  groups_from_json({static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()}, groups_);
  const std::string text = difference(without_entries(model, optimizer, fields_));
  TORCH_CHECK_VALUE(text.empty(), caller, text,
                    " Load the state of the same optimizer over the same model.");
}

std::string OptimizerLoad::difference(const OptimizerState& want) const {
  if (groups_.kind != want.kind)
    return "expected the state of " + want.kind + ", got that of " + groups_.kind + ".";
  if (groups_.groups.size() != want.groups.size()) {
    return "expected " + std::to_string(want.groups.size()) + " parameter groups, got " +
           std::to_string(groups_.groups.size()) + ".";
  }
  std::vector<std::string> wrong;
  std::set<std::string> known;
  for (size_t g = 0; g < want.groups.size(); ++g) {
    const OptimizerState::Group &got = groups_.groups[g], &own = want.groups[g];
    const auto same_key = [](const auto& a, const auto& b) { return a.first == b.first; };
    const bool same_options = std::equal(got.options.begin(), got.options.end(),
                                         own.options.begin(), own.options.end(), same_key);
    if (got.parameters != own.parameters || !same_options) {
      return "expected the parameters and options of group " + std::to_string(g) + ", got others.";
    }
    for (size_t p = 0; p < own.parameters.size(); ++p) {
      known.insert(own.parameters[p]);
      const std::string text =
          wrong_fields(own.parameters[p], optimizer_.param_groups()[g].params()[p], got.options);
      if (!text.empty()) wrong.push_back(own.parameters[p] + ": " + text);
    }
  }
  for (const auto& [name, offer] : exchange_.offers()) {
    const size_t slash = name.rfind('/');
    if (slash != std::string::npos && !known.contains(name.substr(0, slash)))
      wrong.push_back(name + ": no such parameter");
  }
  return wrong.empty()
             ? ""
             : "expected a state that fits the parameters, got wrong ones: " + listed(wrong) + ".";
}

std::string OptimizerLoad::wrong_fields(const std::string& parameter, const at::Tensor& tensor,
                                        const OptionValues& options) const {
  std::vector<std::string> missing = fields_.needed(options);
  size_t num_fields = 0;
  const std::vector<std::string> all = fields_.known();
  for (const std::string& field : all) {
    const auto offer = exchange_.offers().find(parameter + "/" + field);
    if (offer == exchange_.offers().end()) continue;
    ++num_fields;
    std::erase(missing, field);
    const bool is_number = field == "step";
    const auto& [dtype, sizes, content, ranks] = offer->second;
    const bool fits = is_number ? dtype == at::kLong && sizes.empty()
                                : dtype == tensor.scalar_type() && tensor.sizes().equals(sizes);
    std::ostringstream text;
    text << field << " is " << dtype << " " << at::IntArrayRef(sizes) << ", the parameter "
         << tensor.scalar_type() << " " << tensor.sizes();
    if (!fits) return text.str();
  }
  const std::string prefix = parameter + "/";
  for (auto at = exchange_.offers().lower_bound(prefix);
       at != exchange_.offers().end() && at->first.starts_with(prefix); ++at) {
    const std::string field = at->first.substr(prefix.size());
    if (std::find(all.begin(), all.end(), field) == all.end()) return "unknown field " + field;
  }
  const bool may_be_absent = num_fields == 0 && fields_.makes_state();
  return missing.empty() || may_be_absent ? "" : "missing field " + missing.front();
}

void OptimizerLoad::apply_options() {
  for (size_t g = 0; g < groups_.groups.size(); ++g) {
    fields_.set_options(optimizer_.param_groups()[g].options(), groups_.groups[g].options);
  }
}

void OptimizerLoad::apply_state() {
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const std::string& name = name_of(model_, parameter);
      const std::vector<int> holders = own_.models().holders(parameter);
      StateFields fields;
      bool has_state = false;
      for (const std::string& field : fields_.known()) {
        if (!exchange_.offers().contains(name + "/" + field)) continue;
        const at::Tensor value = exchange_.deliver(name + "/" + field, holders);
        has_state = true;
        if (value.defined())
          fields[field] = at::empty_like(field == "step" ? value : parameter).copy_(value);
      }
      void* key = parameter.unsafeGetTensorImpl();
      optimizer_.state().erase(key);
      if (has_state && own_.models().is_here(parameter))
        optimizer_.state()[key] = fields_.make_state(fields);
    }
  }
}

}  // namespace smp::engine
