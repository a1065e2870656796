// Code that capture cannot see into, run as one operator on one rank.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

namespace smp {

namespace opaque_internal {

using Tensors = std::vector<at::Tensor>;
using Function = Tensors (*)(const Tensors& inputs);

/// Makes `function` known under `name` in this process and returns its number, the same on all ranks: every rank does so
/// when the program is loaded.
int64_t register_function(const char* name, Function function);
Tensors call(int64_t number, const Tensors& inputs);

template <class Result>
Tensors flatten(Result&& result) {
  if constexpr (std::is_convertible_v<Result, at::Tensor>) {
    return {std::forward<Result>(result)};
  } else if constexpr (std::is_convertible_v<Result, Tensors>) {
    return std::forward<Result>(result);
  } else {
    return std::apply([](auto&&... each) { return Tensors{at::Tensor(each)...}; }, std::forward<Result>(result));
  }
}

template <class F, size_t... I>
auto invoke(const Tensors& inputs, std::index_sequence<I...>) {
  return F{}(at::Tensor(inputs[I])...);
}

template <class F, size_t N>
Tensors run(const Tensors& inputs) {
  return flatten(invoke<F>(inputs, std::make_index_sequence<N>{}));
}

template <class F, size_t N>
struct Registered {
  static inline const int64_t number = register_function(typeid(Registered).name(), &run<F, N>);
};

template <class... Ts, size_t... I>
std::tuple<Ts...> unpack(const Tensors& tensors, std::type_identity<std::tuple<Ts...>>, std::index_sequence<I...>) {
  return {tensors.at(I)...};
}

}  // namespace opaque_internal

/// Calls `function` on `inputs`. Inside a step body it becomes one operator of the graph, which runs on one rank by its own
/// code: custom autograd functions, loops over data, raw pointers and libraries of other kinds are all allowed in it.
///
///   auto y = smp::opaque([](at::Tensor x) { return RoundWithStraightThrough::apply(x); }, hidden);
///
/// `function` is a lambda without captures or a function object without members: what it works on it is given, parameters
/// included, because it runs in another process. It takes tensors and returns a tensor, a std::vector or a std::tuple of
/// them, always as many; sizes and dtypes must follow from those of the inputs, since capture learns them by a call on
/// zeros. It may draw random numbers from LibTorch's default generator. A result that shares memory with an input or with
/// another result (a gradient reversal returns a view) is cloned. Throws c10::Error when it writes to an input: clone() that
/// first.
template <class F, class... Inputs>
  requires std::is_empty_v<F> && std::is_default_constructible_v<F> && (std::is_convertible_v<Inputs, at::Tensor> && ...)
auto opaque(F, const Inputs&... inputs) {
  using namespace opaque_internal;
  using Own = Registered<F, sizeof...(Inputs)>;
  using Result = decltype(invoke<F>(Tensors{}, std::index_sequence_for<Inputs...>{}));
  Tensors results = call(Own::number, {at::Tensor(inputs)...});
  if constexpr (std::is_convertible_v<Result, at::Tensor>) {
    return std::move(results.at(0));
  } else if constexpr (std::is_convertible_v<Result, Tensors>) {
    return results;
  } else {
    return unpack(results, std::type_identity<Result>{}, std::make_index_sequence<std::tuple_size_v<Result>>{});
  }
}

}  // namespace smp
