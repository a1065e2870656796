// Dictionaries of models, and saves, which are made and read as those of C++.
#include "python_bindings/extension/state.h"

#include <c10/util/Exception.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python_bindings/extension/handles.h"
#include "smp/engine/engine.h"
#include "smp/engine/save_series.h"
#include "smp/save_parts.h"
#include "smp/torch_optimizer_view.h"

namespace smp::python {
namespace {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
using StepCounts = std::pair<uint64_t, uint64_t>;  // training, evaluation

std::pair<NamedTensors, StepCounts> to_python(const StateDict& state) {
  NamedTensors tensors;
  for (const StateDict::Entry& entry : state.entries) tensors.emplace_back(entry.name, entry.tensor);
  return {std::move(tensors), StepCounts(state.steps->training, state.steps->evaluation)};
}

// As os.fsdecode would: files of C++ keep any bytes.
py::str text_of(const std::string& bytes) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(bytes.data(), static_cast<Py_ssize_t>(bytes.size()), "surrogateescape"));
}

// Without parameters: constructors make the state of those that they get.
std::unique_ptr<torch::optim::Optimizer> made_of_kind(const std::string& kind) {
  using namespace torch::optim;
  const std::vector<OptimizerParamGroup> none;
  if (kind == "SGD") return std::make_unique<SGD>(none, SGDOptions(/*lr=*/0.1));
  if (kind == "Adam") return std::make_unique<Adam>(none);
  if (kind == "AdamW") return std::make_unique<AdamW>(none);
  if (kind == "RMSprop") return std::make_unique<RMSprop>(none);
  TORCH_INTERNAL_ASSERT(kind == "Adagrad", "files of C++ hold no ", kind);
  return std::make_unique<Adagrad>(none);
}

/// What files hold in place of an optimizer of torch.optim: LibTorch's of that kind, over the same parameters.
struct LibTorchOptimizer {
  LibTorchOptimizer(const std::string& kind, const std::vector<std::vector<at::Tensor>>& groups, const OptimizerHandle& own)
      : made(made_of_kind(kind)) {
    for (const auto& parameters : groups) made->add_param_group(torch::optim::OptimizerParamGroup(parameters));
    auto its_view = view_of(*made);
    view = its_view.get();
    optimizer = engine::stand_in(std::move(its_view), *own.optimizer);
  }
  engine::OptionValues options(size_t group) const { return view->groups().at(group).options; }
  std::vector<std::string> fields() const {
    const engine::StateRules rules = view->state()->rules(options(0)).value();
    std::vector<std::string> names;
    for (const engine::StateField& field : rules.fields) names.push_back(field.name);
    return names;
  }

  std::unique_ptr<torch::optim::Optimizer> made;
  engine::OptimizerView* view = nullptr;
  std::shared_ptr<engine::Optimizer> optimizer;
};

using NamedModels = std::vector<std::pair<std::string, const ModelHandle*>>;
using NamedOptimizers = std::vector<std::pair<std::string, const LibTorchOptimizer*>>;

state_file_internal::Parts parts_of(const NamedModels& models, const NamedOptimizers& optimizers) {
  state_file_internal::Parts parts;
  for (const auto& [name, model] : models) parts.models.emplace(name, model->model);
  for (const auto& [name, optimizer] : optimizers) parts.optimizers.emplace(name, optimizer->optimizer);
  return parts;
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
    series.save(step, state_file_internal::states_of(parts_of(models, optimizers)), user, in_background);
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
    const auto parts = parts_of(models, optimizers);
    unlocked([&] { state_file_internal::save(folder, state_file_internal::states_of(parts), user); });
  });
  py::class_<LibTorchOptimizer>(module, "LibTorchOptimizer")
      .def(py::init<const std::string&, const std::vector<std::vector<at::Tensor>>&, const OptimizerHandle&>())
      .def("fields", &LibTorchOptimizer::fields)
      .def("options", &LibTorchOptimizer::options)
      .def("set_options", [](const LibTorchOptimizer& own, size_t group,
                             const engine::OptionValues& values) { own.view->state()->set_options(group, values); })
      .def("state", [](const LibTorchOptimizer& own, const at::Tensor& tensor) { return own.view->state()->of(tensor); })
      .def("set_state", [](const LibTorchOptimizer& own, const at::Tensor& tensor, const engine::StateFields& fields) {
        own.view->state()->set(tensor, fields);
      });
  py::class_<engine::SaveSeries, std::unique_ptr<engine::SaveSeries, DeleteUnlocked>>(module, "SaveSeries")
      .def(py::init([](const std::string& folder, int num_kept, bool on_each_host) {
        const SaveCopies copies = on_each_host ? SaveCopies::kOnEachHost : SaveCopies::kOne;
        return new engine::SaveSeries(folder, num_kept, copies);
      }))
      .def("save", &save_in_series)
      .def("finish", [](engine::SaveSeries& series) { unlocked([&] { series.finish(); }); })
      .def_static("resume", &resume_from_series);
  // Calls take_over when the optimizers of LibTorch have what all ranks have read and all fits, before models change.
  module.def("load_state", [](const std::string& folder, const NamedModels& models, const NamedOptimizers& optimizers,
                              const py::function& take_over) {
    const auto parts = parts_of(models, optimizers);
    const UserContent user = unlocked([&] {
      state_file_internal::Reader reader(folder, state_file_internal::keys_of(parts.models),
                                         state_file_internal::keys_of(parts.optimizers));
      for (const auto& [name, model] : parts.models) reader.check(name, *model);
      for (const auto& [name, optimizer] : parts.optimizers) engine::load_state_dict(*optimizer, reader.optimizer(name));
      {
        const py::gil_scoped_acquire lock;
        take_over();
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
