// Which tensors a step argument holds, found at compile time. Owns no tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace smp::step_internal {

/// Types that hold no tensors, as far as their name tells. Each other type says how its tensors are
/// visited, in order.
template <class T>
struct Parts {
  static constexpr bool kHoldTensors = false;
};
template <class T>
inline constexpr bool holds_tensors = Parts<std::remove_cvref_t<T>>::kHoldTensors;

/// Calls `visitor` with each tensor in `object`, in one order for all objects of one structure.
template <class T, class Visitor>
void for_each_tensor(T& object, const Visitor& visitor) {
  if constexpr (holds_tensors<T>) Parts<std::remove_cv_t<T>>::visit(object, visitor);
}

template <>
struct Parts<at::Tensor> {
  static constexpr bool kHoldTensors = true;
  static void visit(auto& tensor, const auto& visitor) { visitor(tensor); }
};

template <class Element>
struct SequenceParts {
  static constexpr bool kHoldTensors = holds_tensors<Element>;
  static void visit(auto& sequence, const auto& visitor) {
    for (auto& element : sequence) for_each_tensor(element, visitor);
  }
};
template <class T, class A>
struct Parts<std::vector<T, A>> : SequenceParts<T> {};
template <class T, class A>
struct Parts<std::list<T, A>> : SequenceParts<T> {};
template <class T, class A>
struct Parts<std::deque<T, A>> : SequenceParts<T> {};
template <class T, size_t N>
struct Parts<std::array<T, N>> : SequenceParts<T> {};

/// Values in the order of the keys.
template <class K, class T, class C, class A>
struct Parts<std::map<K, T, C, A>> {
  static constexpr bool kHoldTensors = holds_tensors<T>;
  static void visit(auto& map, const auto& visitor) {
    for (auto& [key, value] : map) for_each_tensor(value, visitor);
  }
};

template <class T>
struct Parts<std::optional<T>> {
  static constexpr bool kHoldTensors = holds_tensors<T>;
  static void visit(auto& optional, const auto& visitor) {
    if (optional) for_each_tensor(*optional, visitor);
  }
};

template <class... Ts>
struct TupleParts {
  static constexpr bool kHoldTensors = (holds_tensors<Ts> || ...);
  static void visit(auto& tuple, const auto& visitor) {
    std::apply([&](auto&... element) { (for_each_tensor(element, visitor), ...); }, tuple);
  }
};
template <class... Ts>
struct Parts<std::tuple<Ts...>> : TupleParts<Ts...> {};
template <class First, class Second>
struct Parts<std::pair<First, Second>> : TupleParts<First, Second> {};

/// torch::data::Example, whose header is too large to include here. Target is void where there is
/// none.
template <class T>
concept IsExample = requires(T example) {
  typename T::DataType;
  typename T::TargetType;
  example.data;
};
template <IsExample T>
struct Parts<T> {
  static constexpr bool kHoldTensors =
      holds_tensors<typename T::DataType> || holds_tensors<typename T::TargetType>;
  static void visit(auto& example, const auto& visitor) {
    for_each_tensor(example.data, visitor);
    if constexpr (!std::is_void_v<typename T::TargetType>) for_each_tensor(example.target, visitor);
  }
};

template <class T>
struct ArgumentThatCannotBeCut {
  static_assert(!std::is_same_v<T, T>,
                "smp::step: expected tensors as arguments, or std::vector, list, deque, array, "
                "map, optional, pair, "
                "tuple or torch::data::Example of them, got the type T named here, whose tensors "
                "cannot be cut into "
                "microbatches. Pass its tensors as arguments of their own; or let the body capture "
                "the object ([&]), if "
                "every microbatch is to see all of it.");
};
/// Any other template of tensors: a list handle, a hash map (no fixed order), a pointer to a
/// container.
template <template <class...> class C, class... Ts>
requires((holds_tensors<Ts> || ...) && !IsExample<C<Ts...>>) struct Parts<C<Ts...>> {
  static constexpr bool kHoldTensors = true;
  static void visit(auto&, const auto&) { static_cast<void>(ArgumentThatCannotBeCut<C<Ts...>>{}); }
};

}  // namespace smp::step_internal
