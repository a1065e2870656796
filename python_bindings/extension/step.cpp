// What the engine asks for during a step is asked of Python with the lock held; between two questions it is free.
#include "python_bindings/extension/step.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <tuple>
#include <vector>

#include "python_bindings/extension/texts.h"
#include "smp/engine/engine.h"
#include "smp/step_call.h"

namespace smp::python {
namespace {

using step_internal::Call;
using step_internal::Results;
using step_internal::Share;
using step_internal::StepNumber;
using step_internal::StepTensor;
using step_internal::Tensors;

// Raised by Python on this rank, which gets it as it was; ranks that hear of it throw c10::ValueError with its text.
struct PythonValueError : c10::ValueError {
  PythonValueError(const std::string& text, const py::error_already_set& own)
      : c10::ValueError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, text), error(own) {}
  py::error_already_set error;
};

/// What fn() returns, called with the lock.
template <class Fn>
auto locked(const Fn& fn) {
  const py::gil_scoped_acquire lock;
  try {
    return fn();
  } catch (const py::error_already_set& error) {
    put_in_python(error);  // torch may have made it of an error of the engine
    if (!error.matches(PyExc_ValueError)) throw;
    throw PythonValueError(escaped_text(error.value()), error);
  }
}

/// (tensor, position of its argument, axis, whether it stays whole, its own pieces)
using TensorTuple = std::tuple<at::Tensor, int64_t, int64_t, bool, Tensors>;

std::vector<StepTensor> arguments_of(const py::object& step, const Share& share) {
  std::vector<StepTensor> tensors;
  for (const py::handle item : step.attr("arguments")(share.microbatches, share.replica, share.replicas)) {
    auto [tensor, position, axis, is_whole, pieces] = item.cast<TensorTuple>();
    tensors.push_back({std::move(tensor), position, axis, is_whole, std::move(pieces)});
  }
  return tensors;
}

std::vector<std::string> values_of(const py::object& step) {
  std::vector<std::string> values;
  for (const py::handle value : step.attr("values")()) values.push_back(value.cast<py::bytes>());
  return values;
}

// `step`: an object with the methods above.
py::tuple run_step(StepNumber& number, const py::object& step) {
  const Call call{
      .arguments = [&](const Share& share) { return locked([&] { return arguments_of(step, share); }); },
      .body = [&](const Tensors& in, int64_t m) { return locked([&] { return step.attr("body")(in, m).cast<Tensors>(); }); },
      .differ = [&] { return locked([&] { return step.attr("differ")().cast<bool>(); }); },
      .values = [&] { return locked([&] { return values_of(step); }); },
      .payload = [&] { return locked([&] { return std::string(step.attr("payload")().cast<py::bytes>()); }); },
      .cpu_is_read = false,  // smdistributed/modelparallel/torch/ghosts.py asks
  };
  Results results;
  try {
    results = unlocked([&] { return engine::call_step(number.get(), call); });
  } catch (const PythonValueError& own) {
    throw own.error;
  }
  py::list tensors, values;
  for (const StepOutput& output : results.tensors) tensors.append(py::cast(output.outputs()));
  for (const std::string& value : results.values) values.append(py::bytes(value));
  return py::make_tuple(tensors, values, py::bytes(results.payload));
}

}  // namespace

void bind_step(py::module_& module) {
  py::class_<StepNumber>(module, "StepNumber").def(py::init<>());
  module.def("run_step", &run_step);
}

}  // namespace smp::python
