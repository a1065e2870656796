// State of a model. Before the first step every rank holds everything, so that a load takes effect
// at once there too; only where construction has put values off, it waits for the placement as well.
#include "smp/engine/checkpoint/model_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "runtime/exchange/state_exchange.h"
#include "runtime/libtorch/unmade.h"
#include "smp/engine/context/call.h"
#include "smp/engine/optimizers/optimizer_settings.h"

namespace smp::engine {

using partitioner::ValueKind;
using Name = runtime::Bindings::Name;

namespace {

// No name of a module has a blank.
constexpr const char* kSteps = "smp steps";
constexpr const char* kIsDelayed = "smp is delayed";  // some rank has no values of its own yet

bool is_delayed(const Model& model) {
  const auto& tensors = model.own.tensors();
  return std::any_of(tensors.begin(), tensors.end(), [](const auto& named) { return runtime::is_unmade(named.tensor); });
}

// A copy of what the model will get would need all ranks, and a state is gathered over a pipeline.
void check_no_pending_load(const Model& model) {
  TORCH_CHECK_VALUE(model.pending_loads.empty(),
                    "state of a model: expected a step after load_state_dict, got none: the model was constructed under "
                    "smp::DelayParamInitialization, and the loaded values wait for their ranks. Run a step first, or use "
                    "the state that was loaded.");
}

at::Tensor value_of(const at::Tensor& tensor) {
  const runtime::GeneratorHold hold;
  return runtime::value_of(tensor).to(runtime::host().type);
}

at::Tensor tensor_on_host(std::initializer_list<int64_t> numbers) {
  return at::tensor(numbers, at::TensorOptions(runtime::host().type).dtype(at::kLong));
}

StateDict without_tensors(const RankState& own, const Model& model) {
  StateDict state;
  state.steps = {own.training_steps, own.evaluation_steps};
  state.modules = model.view->module_paths();
  std::erase(state.modules, "");
  return state;
}

std::string describe(c10::ScalarType dtype, at::IntArrayRef sizes) {
  std::ostringstream text;
  text << dtype << " " << sizes;
  return text.str();
}

// Entries by name, or what is wrong with them by themselves.
std::map<std::string, at::Tensor> offered(const StateDict& state, std::string& error) {
  std::map<std::string, at::Tensor> tensors;
  for (const StateDict::Entry& entry : state.entries) {
    if ((entry.name == kSteps || entry.name == kIsDelayed) && error.empty())
      error = "expected names of parameters and buffers, got '" + entry.name + "', which smp uses itself.";
    const bool is_plain = runtime::is_within_reach(entry.tensor) && entry.tensor.layout() == at::kStrided;
    if (!is_plain && error.empty()) error = "expected dense CPU tensors, got another one for '" + entry.name + "'.";
    const bool is_new = !is_plain || tensors.emplace(entry.name, entry.tensor.to(runtime::host().type)).second;
    if (!is_new && error.empty()) {
      error = "expected each name once, got '" + entry.name + "' twice.";
    }
  }
  if (state.steps) {
    const auto training = static_cast<int64_t>(state.steps->training);
    tensors.emplace(kSteps, tensor_on_host({training, static_cast<int64_t>(state.steps->evaluation)}));
  }
  if (!error.empty()) tensors.clear();
  return tensors;
}

std::shared_ptr<runtime::StateExchange> exchange_of(const RankState& own, const Model& model, const StateDict& state,
                                                    std::string own_error) {
  auto tensors = offered(state, own_error);
  if (is_delayed(model)) tensors.emplace(kIsDelayed, tensor_on_host({1}));
  return std::make_shared<runtime::StateExchange>(std::move(tensors), std::move(own_error), own.context.pipeline,
                                                  own.context.replicas);
}

// As expand() makes them.
bool has_several_on_one_place(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return false;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) == 0) return true;
  }
  return false;
}

// How the offers differ from what the model has; empty when they fit.
class LoadDifference {
 public:
  LoadDifference(const runtime::Bindings& bindings, const runtime::StateExchange& exchange)
      : bindings_(bindings), offers_(exchange.offers()) {
    std::map<size_t, std::string> first_name;  // of each tensor, among the offered
    for (const Name& name : bindings.names()) {
      if (!name.is_persistent) continue;
      known_.insert(name.name);
      const auto offer = offers_.find(name.name);
      offer == offers_.end() ? missing_.push_back(name.name) : compare(name, offer->second, first_name);
    }
    for (const auto& [name, offer] : offers_) {
      if (!known_.contains(name) && name != kSteps && name != kIsDelayed) unexpected_.push_back(name);
    }
  }

  std::string text(bool strict) const {
    std::string text;
    const auto add = [&](const char* what, const std::vector<std::string>& list) {
      if (!list.empty()) text += (text.empty() ? "" : "; ") + (what + listed(list));
    };
    if (strict) add("missing: ", missing_);
    if (strict) add("unexpected: ", unexpected_);
    add("wrong: ", wrong_);
    if (text.empty()) return text;
    return "expected the names, shapes and types of the model's parameters and buffers, got " + text +
           ". Load the state of the same model" +
           (strict && wrong_.empty() ? ", or pass strict = false to load what fits." : ".");
  }

 private:
  void compare(const Name& name, const runtime::StateExchange::Offer& offer, std::map<size_t, std::string>& first_name) {
    const at::Tensor& own = bindings_.tensors()[name.tensor].tensor;
    if (has_several_on_one_place(own)) {
      wrong_.push_back(name.name + ": strides " + c10::str(own.strides()) +
                       ", by which elements share memory (register a clone())");
    }
    if (offer.dtype != own.scalar_type() || !own.sizes().equals(offer.sizes)) {
      wrong_.push_back(name.name + ": " + describe(offer.dtype, offer.sizes) + " in place of " +
                       describe(own.scalar_type(), own.sizes()));
    }
    const auto [first, is_new] = first_name.emplace(name.tensor, name.name);
    if (!is_new && offers_.at(first->second).content != offer.content) {
      wrong_.push_back(name.name + ": other values than " + first->second + ", which is the same tensor of the model");
    }
  }

  const runtime::Bindings& bindings_;
  const std::map<std::string, runtime::StateExchange::Offer>& offers_;
  std::set<std::string> known_;
  std::vector<std::string> missing_, unexpected_, wrong_;
};

}  // namespace

StateDict gathered_state(const RankState& own, const Model& model) {
  check_no_pending_load(model);
  check_optimizers(own, *own.context.pipeline, "state_dict");
  std::vector<at::Tensor> copies;  // by tensor: several names share one
  for (const auto& named : model.own.tensors()) {
    if (!named.is_persistent) {
      copies.emplace_back();
      continue;
    }
    const bool is_placed = own.models.is_placed(named.tensor);
    copies.push_back(is_placed ? runtime::copy_on_all(named.tensor, own.models.home(named.tensor).owner(),
                                                      *own.context.pipeline, "state of a model")
                               : value_of(named.tensor).detach().clone());
  }
  StateDict state = without_tensors(own, model);
  for (const Name& name : model.own.names()) {
    if (name.is_persistent) state.entries.push_back({name.name, copies[name.tensor], name.kind == ValueKind::kBuffer});
  }
  return state;
}

StateDict local_state(const RankState& own, const Model& model) {
  check_no_pending_load(model);
  StateDict state = without_tensors(own, model);
  state.is_partial = true;
  for (const Name& name : model.own.names()) {
    const at::Tensor& tensor = model.own.tensors()[name.tensor].tensor;
    if (!name.is_persistent || !own.models.is_here(tensor)) continue;
    state.entries.push_back({name.name, value_of(tensor).detach(), name.kind == ValueKind::kBuffer});
  }
  return state;
}

ModelLoad::ModelLoad(RankState& own, Model& model, const StateDict& state, bool strict, std::string own_error)
    : own_(own), model_(model), exchange_(exchange_of(own, model, state, std::move(own_error))) {
  TORCH_CHECK_VALUE(exchange_->error().empty(), "load_state_dict: ", exchange_->error());
  const std::string difference = LoadDifference(model.own, *exchange_).text(strict);
  TORCH_CHECK_VALUE(difference.empty(), "load_state_dict: ", difference);
  TORCH_CHECK_VALUE(own.context.is_laid_out || !exchange_->offers().contains(kIsDelayed),
                    "load_state_dict: expected a step before it, got none: the model was constructed under "
                    "smp::DelayParamInitialization, and with parallelism=auto the first step decides which ranks will hold "
                    "what is loaded. Run a step first, or construct the model without that scope.");
}

void ModelLoad::apply() {
  forget_optimizer_steps(own_);
  if (exchange_->offers().contains(kIsDelayed)) {
    model_.pending_loads.push_back(exchange_);
  } else {
    load_tensors(*exchange_, model_, [&](const at::Tensor& tensor) { return own_.models.home(tensor); });
  }
  if (!exchange_->offers().contains(kSteps)) return;
  const at::Tensor steps = exchange_->deliver(kSteps, runtime::TensorHome::on_all(own_.context.pipeline->size()));
  TORCH_INTERNAL_ASSERT(steps.numel() == 2, "training and evaluation steps");
  own_.training_steps = static_cast<uint64_t>(steps[0].item<int64_t>());
  own_.evaluation_steps = static_cast<uint64_t>(steps[1].item<int64_t>());
}

}  // namespace smp::engine
