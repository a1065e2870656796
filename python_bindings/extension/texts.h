// Messages of the engine in the words of Python.
#pragma once

#include <string>

#include "python_bindings/extension/interpreter.h"

namespace smp::python {

/// `text` with the names of C++ as a script would write them: "smp::init" is smp.init, "torch::NoGradGuard" torch.no_grad().
std::string in_python(std::string text);
/// The same for the text of an exception, which stays the object that it is, with its traceback. With the lock.
void put_in_python(const py::error_already_set& error);
/// str(value); what UTF-8 cannot hold, lone surrogates, is escaped. With the lock.
std::string escaped_text(const py::handle& value);

}  // namespace smp::python
