// Each method takes the lock and asks the object.
#include "python_bindings/extension/views.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace smp::python {
namespace {

class PythonModel : public engine::ModelView {
 public:
  explicit PythonModel(py::object view) : view_(keep(std::move(view))) {}

  std::vector<engine::ModelTensor> tensors() const override {
    const py::gil_scoped_acquire lock;
    std::vector<engine::ModelTensor> tensors;
    for (const py::handle item : view_->attr("tensors")()) {
      auto [name, tensor, is_buffer, is_persistent] = item.cast<std::tuple<std::string, at::Tensor, bool, bool>>();
      tensors.push_back({std::move(name), std::move(tensor), is_buffer, is_persistent});
    }
    return tensors;
  }
  std::vector<std::string> module_paths() const override {
    const py::gil_scoped_acquire lock;
    return view_->attr("module_paths")().cast<std::vector<std::string>>();
  }
  bool is_training() const override {
    const py::gil_scoped_acquire lock;
    return view_->attr("is_training")().cast<bool>();
  }

 private:
  std::shared_ptr<const py::object> view_;
};

class PythonOptimizer : public engine::OptimizerView {
 public:
  explicit PythonOptimizer(py::object view) : view_(keep(std::move(view))) {}

  engine::OptimizerMemory memory() const override {
    const py::gil_scoped_acquire lock;
    const auto [state, workspace] = view_->attr("memory")().cast<std::pair<double, double>>();
    return {.state = state, .workspace = workspace};
  }
  std::vector<engine::OptimizerGroup> groups() const override {
    const py::gil_scoped_acquire lock;
    std::vector<engine::OptimizerGroup> groups;
    for (const py::handle group : view_->attr("groups")()) {
      auto [parameters, options] = group.cast<std::pair<std::vector<at::Tensor>, engine::OptionValues>>();
      groups.push_back({.parameters = std::move(parameters), .options = std::move(options)});
    }
    return groups;
  }
  std::string kind() const override {
    const py::gil_scoped_acquire lock;
    return view_->attr("kind")().cast<std::string>();
  }
  std::string refusal() const override {
    return "expected a torch.optim.Optimizer, got another object, whose state is not known. Give smp the optimizer within.";
  }
  void set_options(size_t group, const engine::OptionValues& values) override {
    const py::gil_scoped_acquire lock;
    view_->attr("set_options")(group, values);
  }
  // Loads are made in Python, where fields may be anything; the engine knows those that are there.
  std::vector<engine::StateField> fields() const override { return {}; }
  std::vector<std::string> needed_fields(const engine::OptionValues&) const override { return {}; }
  bool makes_state() const override { return true; }
  std::optional<engine::StateFields> state(const at::Tensor& parameter) const override {
    const py::gil_scoped_acquire lock;
    return view_->attr("state")(parameter).cast<std::optional<engine::StateFields>>();
  }
  void set_state(const at::Tensor& parameter, const engine::StateFields& fields) override {
    const py::gil_scoped_acquire lock;
    view_->attr("set_state")(parameter, fields);
  }
  void erase_state(const at::Tensor& parameter) override {
    const py::gil_scoped_acquire lock;
    view_->attr("erase_state")(parameter);
  }

 private:
  std::shared_ptr<const py::object> view_;
};

}  // namespace

std::shared_ptr<const engine::ModelView> model_view(py::object view) {
  return std::make_shared<PythonModel>(std::move(view));
}

std::unique_ptr<engine::OptimizerView> optimizer_view(py::object view) {
  return std::make_unique<PythonOptimizer>(std::move(view));
}

}  // namespace smp::python
