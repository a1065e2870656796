// One function in the engine's table stands for all of Python: what it calls is in the details of each call.
#include "python_bindings/extension/opaque.h"

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "smp/engine/opaque_table.h"

namespace smp::python {

void bind_opaque(py::module_& module) {
  static int64_t number = -1;
  // run(tensors, details) -> tensors, on the rank of the stage. Once per process.
  module.def("set_opaque", [](py::function run) {
    engine::set_interpreter([] { return std::make_shared<py::gil_scoped_acquire>(); });
    const auto call = [run = keep(std::move(run))](const std::vector<at::Tensor>& inputs, const std::string& details) {
      return (*run)(inputs, details).cast<std::vector<at::Tensor>>();
    };
    number = engine::add_opaque("smdistributed.modelparallel.torch", {call, /*needs_interpreter=*/true});
  });
  module.def("opaque_stand_ins", &engine::opaque_stand_ins);  // None but for a call that is recorded
  module.def("call_opaque", [](const std::vector<at::Tensor>& inputs, const std::string& details) {
    return unlocked([&] { return engine::call_opaque(number, inputs, details); });
  });
}

}  // namespace smp::python
