// The tensors in boxed arguments and results, lists included.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>

namespace smp::runtime {

/// Calls `visit` for each defined tensor in `boxed`, with its place in a list (-1: in none).
void for_each_tensor(const c10::IValue& boxed, const std::function<void(int element, const at::Tensor&)>& visit);

/// Calls `replace` for each defined tensor in `boxed`. Lists become other ones.
void map_tensors(c10::IValue& boxed, const std::function<at::Tensor(const at::Tensor&)>& replace);

/// Puts a tensor in place of `boxed`, or of an element of a list, which becomes another one.
void put_tensor(c10::IValue& boxed, int element, const at::Tensor& tensor);

}  // namespace smp::runtime
