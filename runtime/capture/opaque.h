// The operator smp::opaque: a function of the user's, known by name in every process of the program.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace smp::runtime {

using OpaqueFunction = std::vector<at::Tensor> (*)(const std::vector<at::Tensor>& inputs);

/// Thread-safe; returns true. Two functions under one name make calls of it an error.
bool register_opaque(const std::string& name, OpaqueFunction function);

/// Calls the operator, so that a body in progress records it.
std::vector<at::Tensor> call_opaque(const std::string& name, const std::vector<at::Tensor>& inputs);

}  // namespace smp::runtime
