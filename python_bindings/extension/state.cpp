// Optimizers are known in Python alone: here their state is kind, groups and entries in the words of LibTorch.
#include "python_bindings/extension/state.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python_bindings/extension/model_handle.h"
#include "smp/engine/engine.h"
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
  module.def("save_state", [](const std::string& folder, const ModelHandle& own, const std::string& kind,
                              const OptimizerGroups& groups, const OptimizerEntries& entries, const UserContent& user) {
    OptimizerState optimizer{.kind = kind, .groups = {}, .entries = entries, .is_partial = true};
    for (const auto& [options, parameters] : groups) optimizer.groups.push_back({options, parameters});
    unlocked([&] { state_file_internal::save(folder, engine::local_state_dict(*own.model), optimizer, user); });
  });
  // Calls check with the kind, groups and entries of an optimizer that this rank has read, before the model changes.
  module.def("load_state", [](const std::string& folder, const ModelHandle& own, const py::function& check) {
    const UserContent user = unlocked([&] {
      state_file_internal::Reader reader(folder);
      reader.check_model(*own.model);
      {
        const py::gil_scoped_acquire lock;
        check(*optimizer_to_python(reader.optimizer()));
      }
      reader.apply_model();
      return reader.user();
    });
    py::dict content;
    for (const auto& [key, value] : user) content[text_of(key)] = text_of(value);
    return content;
  });
}

}  // namespace smp::python
