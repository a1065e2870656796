// Each method takes the lock and asks the object.
#include "python_bindings/extension/views.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace smp::python {
namespace {

using View = std::shared_ptr<const py::object>;

template <class Result, class... Args>
Result ask(const View& view, const char* method, const Args&... args) {
  const py::gil_scoped_acquire lock;
  return view->attr(method)(args...).template cast<Result>();
}

class PythonModel : public engine::ModelView {
 public:
  explicit PythonModel(View view) : view_(std::move(view)) {}

  std::vector<engine::ModelTensor> tensors() const override {
    auto told = ask<std::vector<std::tuple<std::string, at::Tensor, bool, bool>>>(view_, "tensors");
    std::vector<engine::ModelTensor> tensors;
    for (auto& [name, tensor, is_buffer, is_persistent] : told) {
      tensors.push_back({std::move(name), std::move(tensor), is_buffer, is_persistent});
    }
    return tensors;
  }
  std::vector<std::string> module_paths() const override { return ask<std::vector<std::string>>(view_, "module_paths"); }
  bool is_training() const override { return ask<bool>(view_, "is_training"); }

 private:
  View view_;
};

class PythonOptimizer : public engine::OptimizerView, public engine::StateView {
 public:
  explicit PythonOptimizer(View view) : view_(std::move(view)) {}

  bool is_elementwise() const override { return is_elementwise_; }
  engine::OptimizerMemory memory() const override {
    const auto [state, workspace] = ask<std::pair<double, double>>(view_, "memory");
    return {.state = state, .workspace = workspace};
  }
  std::vector<engine::OptimizerGroup> groups() const override {
    auto told = ask<std::vector<std::pair<std::vector<at::Tensor>, engine::OptionValues>>>(view_, "groups");
    std::vector<engine::OptimizerGroup> groups;
    for (auto& [parameters, options] : told) {
      groups.push_back({.parameters = std::move(parameters), .options = std::move(options)});
    }
    return groups;
  }
  void erase_state(const at::Tensor& parameter) override { ask<void>(view_, "erase_state", parameter); }
  std::vector<at::Tensor> tensors_kept_for(const at::Tensor& parameter) const override {
    return ask<std::vector<at::Tensor>>(view_, "tensors_kept_for", parameter);
  }
  std::function<void()> snapshot() override {
    const py::gil_scoped_acquire lock;
    return [put_back = keep(view_->attr("snapshot")())] {
      const py::gil_scoped_acquire again;
      (*put_back)();
    };
  }
  StateView* state() override { return has_state_ ? this : nullptr; }
  std::string refusal() const override {
    return "expected a torch.optim.Optimizer, got another object, whose state is not known. Give smp the optimizer within.";
  }

  std::string kind() const override { return ask<std::string>(view_, "kind"); }
  void set_options(size_t group, const engine::OptionValues& values) override {
    ask<void>(view_, "set_options", group, values);
  }
  std::optional<engine::StateRules> rules(const engine::OptionValues&) const override { return std::nullopt; }
  std::optional<engine::StateFields> of(const at::Tensor& parameter) const override {
    return ask<std::optional<engine::StateFields>>(view_, "state", parameter);
  }
  void set(const at::Tensor& parameter, const engine::StateFields& fields) override {
    ask<void>(view_, "set_state", parameter, fields);
  }

 private:
  View view_;
  bool has_state_ = ask<bool>(view_, "has_state"), is_elementwise_ = ask<bool>(view_, "is_elementwise");
};

}  // namespace

std::shared_ptr<const engine::ModelView> model_view(py::object view) {
  return std::make_shared<PythonModel>(keep(std::move(view)));
}

std::unique_ptr<engine::OptimizerView> optimizer_view(py::object view) {
  return std::make_unique<PythonOptimizer>(keep(std::move(view)));
}

}  // namespace smp::python
