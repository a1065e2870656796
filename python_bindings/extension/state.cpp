// Optimizers are known in Python alone: here their state is kind, groups and entries in the words of LibTorch.
#include "python_bindings/extension/state.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python_bindings/extension/handles.h"
#include "smp/engine/engine.h"
#include "smp/engine/save_series.h"
#include "smp/state_reader.h"

namespace smp::python {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using StepCounts = std::pair<uint64_t, uint64_t>;  // training, evaluation

std::pair<NamedTensors, StepCounts> to_python(const StateDict& state) {
  NamedTensors tensors;
  for (const StateDict::Entry& entry : state.entries) tensors.emplace_back(entry.name, entry.tensor);
  return {std::move(tensors), StepCounts(state.steps->training, state.steps->evaluation)};
}

using OptimizerGroups = std::vector<std::pair<engine::OptionValues, std::vector<std::string>>>;
using OptimizerEntries = std::map<std::string, engine::StateFields>;  // by parameter

// As os.fsdecode would: files of C++ keep any bytes.
py::str text_of(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape"));
}

py::tuple optimizer_to_python(const OptimizerState& state) {
  py::list groups;
  for (const OptimizerState::Group& group : state.groups) {
    py::dict options;
    for (const auto& [name, value] : group.options) options[text_of(name)] = value;
    py::list parameters;
    for (const std::string& name : group.parameters) parameters.append(text_of(name));
    groups.append(py::make_tuple(options, parameters));
  }
  py::dict entries;
  for (const auto& [parameter, fields] : state.entries) {
    py::dict tensors;
    for (const auto& [field, tensor] : fields) tensors[text_of(field)] = tensor;
    entries[text_of(parameter)] = tensors;
  }
  return py::make_tuple(text_of(state.kind), groups, entries);
}

using NamedModels = std::vector<std::pair<std::string, const ModelHandle*>>;
using NamedOptimizers = std::vector<std::tuple<std::string, std::string, OptimizerGroups, OptimizerEntries>>;  // name, kind

// Copies of the models', but the optimizers' own.
state_file_internal::SavedStates states_of(const NamedModels& models, const NamedOptimizers& optimizers) {
  state_file_internal::SavedStates states;
  for (const auto& [name, model] : models) {
    states.models.emplace(name, engine::local_state_dict(*model->model));
    if (!engine::is_partitioned(*model->model)) states.unplaced.insert(name);
  }
  for (const auto& [name, kind, groups, entries] : optimizers) {
    OptimizerState optimizer{.kind = kind, .groups = {}, .entries = entries, .is_partial = true};
    for (const auto& [options, parameters] : groups) optimizer.groups.push_back({options, parameters});
    states.optimizers.emplace(name, std::move(optimizer));
  }
  return states;
}

// Python goes on while the last file is written.
struct DeleteUnlocked {
  void operator()(engine::SaveSeries* series) const {
    unlocked([&] { delete series; });
  }
};

void save_in_series(engine::SaveSeries& series, int64_t step, const NamedModels& models, const NamedOptimizers& optimizers,
                    const UserContent& user, bool in_background) {
  unlocked([&] {
    series.finish();
    state_file_internal::SavedStates states = states_of(models, optimizers);
    for (auto& [name, optimizer] : states.optimizers) {
      for (auto& [parameter, fields] : optimizer.entries) {
        for (auto& [field, tensor] : fields)
          if (in_background) tensor = tensor.clone();  // torch's own state, which the next step changes
      }
    }
    series.save(step, states, user, in_background);
  });
}

// Calls load with a folder, and takes its ValueError for a save that does not load.
py::object resume_from_series(const std::vector<engine::SaveSeries*>& series, const py::function& load) {
  py::object content;  // of any bytes, which UserContent would refuse
  const auto resumed = unlocked([&] {
    return engine::SaveSeries::resume(series, [&](const std::string& folder) {
      const py::gil_scoped_acquire lock;
      try {
        content = load(folder);
        return UserContent();
      } catch (py::error_already_set& error) {
        if (!error.matches(PyExc_ValueError)) throw;
        throw c10::ValueError({__func__, __FILE__, __LINE__}, py::str(error.value()));
      }
    });
  });
  if (!resumed) return py::none();
  return py::make_tuple(resumed->first, content);
}

}  // namespace

void bind_state(py::module_& module) {
  // (name, tensor) of each, and the counts of steps.
  module.def("state_dict",
             [](const ModelHandle& own) { return to_python(unlocked([&] { return engine::state_dict(*own.model); })); });
  module.def("local_state_dict", [](const ModelHandle& own) {
    return to_python(unlocked([&] { return engine::local_state_dict(*own.model); }));
  });
  module.def("load_state_dict",
             [](const ModelHandle& own, const NamedTensors& tensors, const std::optional<StepCounts>& steps, bool strict) {
               StateDict state;
               for (const auto& [name, tensor] : tensors) state.entries.push_back({name, tensor});
               if (steps) state.steps = {.training = steps->first, .evaluation = steps->second};
               unlocked([&] { engine::load_state_dict(*own.model, state, strict); });
             });
  module.def("save_state", [](const std::string& folder, const NamedModels& models, const NamedOptimizers& optimizers,
                              const UserContent& user) {
    unlocked([&] { state_file_internal::save(folder, states_of(models, optimizers), user); });
  });
  py::class_<engine::SaveSeries, std::unique_ptr<engine::SaveSeries, DeleteUnlocked>>(module, "SaveSeries")
      .def(py::init([](const std::string& folder, int num_kept, bool on_each_host) {
        const SaveCopies copies = on_each_host ? SaveCopies::kOnEachHost : SaveCopies::kOne;
        return new engine::SaveSeries(folder, num_kept, copies);
      }))
      .def("save", &save_in_series)
      .def("finish", [](engine::SaveSeries& series) { unlocked([&] { series.finish(); }); })
      .def_static("resume", &resume_from_series);
  // Calls check with the kind, groups and entries that this rank has read of each optimizer, and when all fit what it has
  // returned, before models change.
  module.def("load_state", [](const std::string& folder, const NamedModels& models,
                              const std::vector<std::string>& optimizers, const py::function& check) {
    const UserContent user = unlocked([&] {
      state_file_internal::Reader reader(folder, state_file_internal::keys_of(models), optimizers);
      for (const auto& [name, model] : models) reader.check(name, *model->model);
      for (const std::string& name : optimizers) static_cast<void>(reader.optimizer(name));
      {
        const py::gil_scoped_acquire lock;
        std::vector<py::object> applications;
        for (const std::string& name : optimizers)
          applications.push_back(check(name, *optimizer_to_python(reader.optimizer(name))));
        for (const py::object& apply : applications) apply();
      }
      reader.apply();
      return reader.user();
    });
    py::dict content;
    for (const auto& [key, value] : user) content[text_of(key)] = text_of(value);
    return content;
  });
}

}  // namespace smp::python
