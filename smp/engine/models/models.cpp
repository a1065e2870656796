// Registration and placement of models.
#include "smp/engine/models/models.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cctype>
#include <map>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "partitioner/report/partition_table.h"
#include "runtime/device/device.h"
#include "runtime/device/random.h"
#include "runtime/exchange/tags.h"
#include "runtime/libtorch/unmade.h"
#include "smp/engine/models/program.h"

namespace smp::engine {

using namespace partitioner;

namespace {

std::vector<runtime::NamedTensor> tensors_of(const ModelView& view, const std::string& prefix) {
  std::vector<runtime::NamedTensor> tensors;
  for (const ModelTensor& each : view.tensors()) {
    const auto kind = each.is_buffer ? ValueKind::kBuffer : ValueKind::kParameter;
    tensors.push_back({kind, prefix + each.name, each.tensor, each.is_persistent});
  }
  return tensors;
}

// Two tensors of one name would be one in graphs and plans.
void check_names(const std::vector<runtime::NamedTensor>& tensors) {
  std::unordered_map<std::string_view, const at::TensorImpl*> known;
  for (const runtime::NamedTensor& named : tensors) {
    const auto [other, is_new] = known.emplace(named.name, named.tensor.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(is_new || other->second == named.tensor.unsafeGetTensorImpl(),
                      "DistributedModel: expected tensors of ", "different names in all models, got '", named.name,
                      "' in two of them. Give one of the models another ",
                      "name: ModelOptions::name stands before the names of its tensors.");
  }
}

// Of two storages on one memory (from_blob) one may be released while the other lives.
void check_memory(const std::vector<runtime::NamedTensor>& tensors) {
  std::map<std::pair<const char*, const c10::StorageImpl*>, const std::string*> by_address;
  for (const runtime::NamedTensor& named : tensors) {
    const c10::Storage& storage = named.tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (!storage || storage.nbytes() == 0) continue;
    const auto* data = static_cast<const char*>(runtime::data_of(storage));
    if (data != nullptr) by_address.emplace(std::pair(data, storage.unsafeGetStorageImpl()), &named.name);
  }
  const char* end = nullptr;
  const std::string* last = nullptr;
  for (const auto& [place, name] : by_address) {
    const auto& [begin, storage] = place;
    TORCH_CHECK_VALUE(begin >= end, "DistributedModel: expected tensors that share memory to be views of one tensor, got '",
                      *last, "' and '", *name,
                      "' on one memory by from_blob or the like. Make views (narrow, view) or copies (clone).");
    end = begin + storage->nbytes();
    last = name;
  }
}

bool is_dead(const WeakTensor& tensor) { return tensor.expired(); }

// The same on all ranks, also where everything is.
void check_whole(const std::vector<runtime::NamedTensor>& tensors, std::vector<WeakTensor>& spread) {
  std::erase_if(spread, is_dead);
  std::unordered_set<const c10::StorageImpl*> known;
  for (const auto& tensor : spread) known.insert(tensor._unsafe_get_target()->unsafe_storage().unsafeGetStorageImpl());
  known.erase(nullptr);  // of sparse ones
  for (const runtime::NamedTensor& named : tensors) {
    const auto& storage = named.tensor.unsafeGetTensorImpl()->unsafe_storage();
    TORCH_CHECK_VALUE(!known.contains(storage.unsafeGetStorageImpl()),
                      "DistributedModel: expected a module whose tensors are whole, got one whose '", named.name,
                      "' a DistributedModel that is gone has spread over the ranks of the pipeline. Keep that one, or take "
                      "its state_dict() and load it into a model of a new module.");
  }
}

bool is_identifier(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

}  // namespace

std::shared_ptr<Model> Models::add(std::shared_ptr<const ModelView> view, const std::string& name) {
  TORCH_CHECK_VALUE(name.empty() || is_identifier(name),
                    "DistributedModel: expected a name of letters, digits and underscores, got '", name,
                    "'. It stands before the names of the model's tensors: 'generator' makes 'generator.fc.weight'.");
  std::string prefix = name.empty() ? "" : name + ".";
  if (name.empty() && num_made_ > 0) prefix = "model" + std::to_string(num_made_) + ".";
  for (const auto& other : models_) {
    TORCH_CHECK_VALUE(other->prefix != prefix,
                      "DistributedModel: expected another name than that of a model that exists, got '", name,
                      "' twice. Give each model a name of its own.");
  }
  check_whole(tensors_of(*view, ""), context_.spread_tensors);
  std::vector<runtime::NamedTensor> tensors = tensors_of_all();
  for (auto& named : tensors_of(*view, prefix)) tensors.push_back(std::move(named));
  check_names(tensors);
  check_memory(tensors);
  auto model = std::make_shared<Model>();
  model->number = num_made_++ % runtime::kMaxReducers;
  const bool is_taken =
      std::any_of(models_.begin(), models_.end(), [&](const auto& other) { return other->number == model->number; });
  TORCH_CHECK(!is_taken, "DistributedModel: expected a model that lives on to see at most ", runtime::kMaxReducers,
              " others made after it, got another one.");
  model->own = runtime::Bindings(tensors_of(*view, ""));
  model->view = std::move(view);
  model->prefix = std::move(prefix);
  models_.push_back(model);
  bind_all();
  follow_storages();
  return model;
}

// What lives on the storage of a tensor that is placed has its home.
void Models::follow_storages() {
  std::unordered_map<const runtime::NamedTensor*, runtime::TensorHome> placed;  // by the first tensor on the storage
  for (const runtime::NamedTensor& named : bindings_.tensors()) {
    const auto known = homes_.find(named.name);
    if (known != homes_.end()) placed.emplace(&bindings_.first_on_storage(named), known->second);
  }
  for (const runtime::NamedTensor& named : bindings_.tensors()) {
    const auto home = placed.find(&bindings_.first_on_storage(named));
    if (home != placed.end()) homes_.emplace(named.name, home->second);
  }
}

void Models::remove(const Model& model) {
  const runtime::Bindings before = bindings_;
  const runtime::TensorHomes homes = std::move(homes_);
  std::erase_if(models_, [&](const auto& known) { return known.get() == &model; });
  bind_all();
  homes_.clear();
  for (const runtime::NamedTensor& named : before.tensors()) {
    const auto placed = homes.find(named.name);
    if (placed == homes.end()) continue;
    const std::string* name = name_of(named.tensor);  // one shared with the model may have another name now
    if (name != nullptr) {
      homes_.emplace(*name, placed->second);
    } else if (context_.pipeline->size() > 1) {
      context_.spread_tensors.emplace_back(named.tensor.getIntrusivePtr());
    }
  }
}

std::vector<runtime::NamedTensor> Models::tensors_of_all() const {
  std::vector<runtime::NamedTensor> tensors;
  for (const auto& model : models_) {
    for (auto& named : tensors_of(*model->view, model->prefix)) tensors.push_back(std::move(named));
  }
  return tensors;
}

void Models::bind_all() { bindings_ = runtime::Bindings(tensors_of_all()); }

std::vector<std::string> Models::module_paths() const {
  std::vector<std::string> paths;
  for (const auto& model : models_) {
    if (!model->prefix.empty()) paths.push_back(model->prefix.substr(0, model->prefix.size() - 1));
    for (const std::string& path : model->view->module_paths()) paths.push_back(model->prefix + path);
    for (const ModelTensor& named : model->view->tensors()) paths.push_back(model->prefix + named.name);
  }
  return paths;
}

std::string Models::training_flags() const {
  std::string flags;
  for (const auto& model : models_) flags += model->view->is_training() ? 't' : 'e';
  return flags;
}

const std::string* Models::name_of(const at::Tensor& tensor) const {
  const runtime::NamedTensor* named = bindings_.find(tensor);
  return named == nullptr ? nullptr : &named->name;
}

const runtime::TensorHome* Models::find_home(const at::Tensor& tensor) const {
  const std::string* name = name_of(tensor);
  const auto found = name == nullptr ? homes_.end() : homes_.find(*name);
  return found == homes_.end() ? nullptr : &found->second;
}

bool Models::is_placed(const at::Tensor& tensor) const { return find_home(tensor) != nullptr; }

bool Models::is_here(const at::Tensor& tensor) const {
  const runtime::TensorHome* home = find_home(tensor);
  return home == nullptr || home->is_on(context_.pipeline->rank());
}

std::set<std::string> Models::placed_or_delayed() const {
  std::set<std::string> names;
  for (const auto& [name, home] : homes_) names.insert(name);
  for (const runtime::NamedTensor& named : bindings_.tensors()) {
    if (runtime::is_unmade(named.tensor)) names.insert(named.name);
  }
  return names;
}

runtime::TensorHome Models::home(const at::Tensor& tensor) const {
  const runtime::TensorHome* home = find_home(tensor);
  return home == nullptr ? runtime::TensorHome::on_all(context_.pipeline->size()) : *home;
}

bool Models::uses(const Graph& graph, const Model& model) const {
  std::unordered_set<std::string_view> names;
  for (const runtime::NamedTensor& named : model.own.tensors()) {
    if (const std::string* name = name_of(named.tensor)) names.insert(*name);
  }
  return std::any_of(graph.values.begin(), graph.values.end(),
                     [&](const Value& value) { return is_named(value) && names.contains(value.name); });
}

bool Models::needs_placement(const Graph& graph, const runtime::TensorHomes& placed) const {
  return std::any_of(graph.values.begin(), graph.values.end(),
                     [&](const Value& value) { return is_named(value) && !placed.contains(value.name); });
}

runtime::TensorHomes Models::homes_after(const Graph& graph, const Plan& plan, const runtime::TensorHomes& placed,
                                         Placement placement) const {
  std::unordered_set<std::string_view> names;
  for (const Value& value : graph.values) {
    if (is_named(value)) names.insert(value.name);
  }
  std::vector<const Model*> used;
  for (const auto& model : models_) {
    if (uses(graph, *model)) used.push_back(model.get());
  }
  std::unordered_set<const runtime::NamedTensor*> on_storages;  // of what is placed: the first tensors there
  for (const runtime::NamedTensor& named : bindings_.tensors()) {
    const bool is_theirs =
        std::any_of(used.begin(), used.end(), [&](const Model* model) { return model->own.find(named.tensor) != nullptr; });
    const bool is_placed = placement == Placement::kWholeModels ? is_theirs : names.contains(named.name);
    if (is_placed) on_storages.insert(&bindings_.first_on_storage(named));
  }
  std::vector<runtime::NamedTensor> theirs;
  for (const runtime::NamedTensor& named : bindings_.tensors()) {
    if (on_storages.contains(&bindings_.first_on_storage(named))) theirs.push_back(named);
  }
  runtime::TensorHomes homes = placed;
  homes.merge(runtime::homes_of(graph, plan, runtime::Bindings(std::move(theirs))));
  return homes;
}

std::vector<std::shared_ptr<Model>> Models::to_place(const Graph& graph) const {
  std::vector<std::shared_ptr<Model>> found;
  for (const auto& model : models_) {
    if (!model->is_partitioned() && uses(graph, *model)) found.push_back(model);
  }
  return found;
}

bool Models::are_alike() const {
  return std::all_of(models_.begin(), models_.end(),
                     [](const auto& model) { return model->is_partitioned() || model->is_alike; });
}

void Models::make_alike() {
  for (const auto& model : models_) {
    const auto& own = model->own.tensors();
    const bool is_put_off =
        std::any_of(own.begin(), own.end(), [](const auto& named) { return runtime::is_unmade(named.tensor); });
    if (model->is_partitioned() || is_put_off || std::exchange(model->is_alike, true)) continue;
    std::vector<at::Tensor> tensors;
    for (const runtime::NamedTensor& named : model->own.tensors()) {
      if (!is_placed(named.tensor)) tensors.push_back(named.tensor);
    }
    runtime::broadcast_tensors(tensors, *context_.world, 0);
    move_to_device(model->own, [](const auto&) { return true; });
  }
}

void Models::move_to_device(const runtime::Bindings& bindings,
                            const std::function<bool(const runtime::NamedTensor&)>& is_here) {
  if (!runtime::move_to_device(bindings, is_here)) return;
  bind_all();
  for (const auto& model : models_) model->own = runtime::Bindings(tensors_of(*model->view, ""));
}

void Models::forget_alike() {
  for (const auto& model : models_) model->is_alike = model->is_alike && model->is_partitioned();
}

void load_tensors(runtime::StateExchange& exchange, const Model& model,
                  const std::function<runtime::TensorHome(const at::Tensor&)>& home_of) {
  const at::NoGradGuard no_grad;
  std::unordered_set<size_t> loaded;
  for (const runtime::Bindings::Name& name : model.own.names()) {
    const at::Tensor& tensor = model.own.tensors()[name.tensor].tensor;
    const runtime::TensorHome home = home_of(tensor);
    if (!name.is_persistent || home.whole_on().empty() || !exchange.offers().contains(name.name)) continue;
    if (!loaded.insert(name.tensor).second) continue;
    const at::Tensor value = exchange.deliver(name.name, home);
    if (!value.defined()) continue;
    {  // on a rank that had put them off, where the first replica had not
      const runtime::GeneratorHold hold;
      runtime::make_values({tensor});
    }
    at::Tensor target = tensor;
    target.copy_(value);
  }
}

void Models::load_pending(const runtime::Bindings& fresh, const runtime::TensorHomes& homes) {
  for (const auto& model : models_) {
    for (const auto& exchange : model->pending_loads) {
      load_tensors(*exchange, *model, [&](const at::Tensor& tensor) {
        const runtime::NamedTensor* named = fresh.find(tensor);
        return named == nullptr ? runtime::TensorHome() : homes.at(named->name);
      });
    }
  }
}

void Models::place(const std::shared_ptr<const Program>& program, Placement placement) {
  runtime::TensorHomes homes = homes_after(program->graph, program->plan, homes_, placement);
  std::vector<runtime::NamedTensor> added;
  for (const runtime::NamedTensor& named : bindings_.tensors()) {
    if (homes.contains(named.name) && !homes_.contains(named.name)) added.push_back(named);
  }
  // What is alike already may have been written to since: by the forwards of a step whose body reads.
  std::vector<runtime::NamedTensor> unlike = added;
  std::erase_if(unlike, [this](const runtime::NamedTensor& named) {
    return std::any_of(models_.begin(), models_.end(),
                       [&](const auto& model) { return model->is_alike && model->own.find(named.tensor) != nullptr; });
  });
  const bool moves_values = !added.empty();
  const runtime::Bindings fresh(std::move(added));
  runtime::make_local_values(homes, fresh, context_.pipeline->rank());
  load_pending(fresh, homes);
  runtime::synchronise(homes, runtime::Bindings(std::move(unlike)), *context_.pipeline, *context_.replicas);
  move_to_device(fresh, [&](const auto& named) { return homes.at(named.name).is_on(context_.pipeline->rank()); });
  runtime::release_others(homes, runtime::Bindings(fresh.tensors()), context_.pipeline->rank());
  if (moves_values) runtime::this_ranks_device().release_free_memory();
  homes_ = std::move(homes);
  if (placement == Placement::kUsedTensors) return;
  for (const auto& model : to_place(program->graph)) {
    model->first_program = program;
    model->pending_loads.clear();
  }
  if (context_.world->rank() == 0) {
    context_.logger.info("Partition assignments:\n" + partition_table(program->graph, program->plan));
  }
}

}  // namespace smp::engine
