// Python's interpreter lock around what the engine calls and keeps. The engine runs without it: a rank that waits, or runs a
// tape, stops no other thread of Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace smp::python {

namespace py = pybind11;

/// An object that C++ keeps: its last handle may go on a thread that does not hold the lock.
inline std::shared_ptr<const py::object> keep(py::object object) {
  return {new py::object(std::move(object)), [](const py::object* kept) {
            const py::gil_scoped_acquire lock;
            delete kept;
          }};
}

/// What fn() returns, called without the lock.
template <class Fn>
decltype(auto) unlocked(const Fn& fn) {
  const py::gil_scoped_release release;
  return fn();
}

}  // namespace smp::python
