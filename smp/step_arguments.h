// Which tensors a step argument holds, found at compile time, and what the body gets in its place.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/fields.h"
#include "smp/step_call.h"

namespace smp::step_internal {

/// Types that hold no tensors, as far as their name tells. Each other type says how its tensors are visited, in order.
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

/// torch::data::Example, whose header is too large to include here. Target is void where there is none.
template <class T>
concept IsExample = requires(T example) {
  typename T::DataType;
  typename T::TargetType;
  example.data;
};
template <IsExample T>
  requires(!HasFields<T>)
struct Parts<T> {
  static constexpr bool kHoldTensors = holds_tensors<typename T::DataType> || holds_tensors<typename T::TargetType>;
  static void visit(auto& example, const auto& visitor) {
    for_each_tensor(example.data, visitor);
    if constexpr (!std::is_void_v<typename T::TargetType>) for_each_tensor(example.target, visitor);
  }
};

/// A struct of the program: its members.
template <HasFields T>
struct Parts<T> {
  using Members = decltype(Fields<T>::of(std::declval<T&>()));
  static constexpr bool kHoldTensors = []<class... Ts>(std::type_identity<std::tuple<Ts...>>) {
    return (holds_tensors<Ts> || ...);
  }(std::type_identity<Members>());
  static void visit(auto& object, const auto& visitor) {
    std::apply([&](auto&... member) { (for_each_tensor(member, visitor), ...); }, Fields<T>::of(object));
  }
};

template <class T>
struct ArgumentThatCannotBeCut {
  static_assert(!std::is_same_v<T, T>,
                "smp::step: expected tensors as arguments, or std::vector, list, deque, array, map, optional, pair, tuple "
                "or torch::data::Example of them, or a struct with smp::Fields, got the type T named here, whose tensors "
                "cannot be cut into microbatches. Pass its tensors as arguments of their own; or let the body capture the "
                "object ([&]), if every microbatch is to see all of it.");
};
/// Any other template of tensors: a list handle, a hash map (no fixed order), a pointer to a container.
template <template <class...> class C, class... Ts>
  requires((holds_tensors<Ts> || ...) && !IsExample<C<Ts...>> && !HasFields<C<Ts...>>)
struct Parts<C<Ts...>> {
  static constexpr bool kHoldTensors = true;
  static void visit(auto&, const auto&) { static_cast<void>(ArgumentThatCannotBeCut<C<Ts...>>{}); }
};

/// How one argument is cut.
struct Cut {
  int64_t position = 0;
  int64_t axis = 0;
  bool is_whole = false;
};

/// Cuts itself: slice = object.smp_slice(num_microbatches, microbatch, axis).
template <class T>
concept SlicesItself = requires(T& object, int64_t number) { object.smp_slice(number, number, number); };

template <class T>
inline constexpr bool is_std_array = false;
template <class T, size_t N>
inline constexpr bool is_std_array<std::array<T, N>> = true;

/// A plain struct may have tensors among its members, which nothing would cut.
template <class T>
inline constexpr bool is_plain_struct =
    std::is_class_v<T> && std::is_aggregate_v<T> && !std::is_empty_v<T> && !HasFields<T> && !is_std_array<T>;

/// One argument of one step: its tensors, and what the body gets in its place. Objects without tensors reach the body as
/// they are.
template <class Arg>
class Argument {
  static_assert(!is_plain_struct<std::remove_cv_t<Arg>>,
                "smp::step: expected a struct with smp::Fields as an argument, got a plain one, whose tensors, if it has "
                "any, would not be cut into microbatches. Name its members with smp::Fields, or let the body capture it "
                "([&]), if every microbatch is to see all of it.");

 public:
  using Picked = Arg&;
  using Handed = Arg&;
  Argument(Arg& original, const Cut&) : original_(original) {}
  void collect(std::vector<StepTensor>&, const Share&) {}
  Picked pick(const Tensors&, size_t&, int64_t) { return original_; }

 private:
  Arg& original_;
};

/// A tensor: the microbatch's part.
template <class Arg>
  requires std::is_base_of_v<at::Tensor, std::remove_cv_t<Arg>>
class Argument<Arg> {
 public:
  using Picked = at::Tensor;
  using Handed = at::Tensor;
  Argument(Arg& original, const Cut& cut) : original_(original), cut_(cut) {}
  void collect(std::vector<StepTensor>& tensors, const Share&) {
    tensors.push_back({original_, cut_.position, cut_.axis, cut_.is_whole, {}});
  }
  Picked pick(const Tensors& microbatch, size_t& next, int64_t) { return microbatch[next++]; }

 private:
  Arg& original_;
  Cut cut_;
};

/// A copy of `object` with the microbatch's tensors.
template <class T>
std::remove_cv_t<T> with_tensors(T& object, const Tensors& microbatch, size_t& next) {
  std::remove_cv_t<T> copy = object;
  for_each_tensor(copy, [&](at::Tensor& tensor) { tensor = microbatch[next++]; });
  return copy;
}

/// A container of tensors.
template <class Arg>
  requires(holds_tensors<Arg> && !std::is_base_of_v<at::Tensor, std::remove_cv_t<Arg>> && !SlicesItself<Arg>)
class Argument<Arg> {
 public:
  using Picked = std::remove_cv_t<Arg>;
  using Handed = Picked&;
  Argument(Arg& original, const Cut& cut) : original_(original), cut_(cut) {}
  void collect(std::vector<StepTensor>& tensors, const Share&) {
    for_each_tensor(original_, [&](const at::Tensor& tensor) {
      tensors.push_back({tensor, cut_.position, cut_.axis, cut_.is_whole, {}});
    });
  }
  Picked pick(const Tensors& microbatch, size_t& next, int64_t) { return with_tensors(original_, microbatch, next); }

 private:
  Arg& original_;
  Cut cut_;
};

/// Throws c10::ValueError: slices with different numbers of tensors, or a whole object where the body takes slices.
[[noreturn]] void refuse_slices(int64_t position, size_t expected, size_t got, int64_t microbatch);
[[noreturn]] void refuse_whole(int64_t position);

/// An object that cuts itself, on the leader once per microbatch: the slice, with tensors of the microbatch in place of
/// those that it holds.
template <SlicesItself Arg>
  requires(!std::is_base_of_v<at::Tensor, std::remove_cv_t<Arg>>)
class Argument<Arg> {
  using Slice = std::remove_cvref_t<decltype(std::declval<Arg&>().smp_slice(0, 0, 0))>;
  static constexpr bool kIsOwnSlice = std::is_same_v<Slice, std::remove_cv_t<Arg>>;

 public:
  using Picked = Slice;
  using Handed = Slice&;
  Argument(Arg& original, const Cut& cut) : original_(original), cut_(cut) {}

  void collect(std::vector<StepTensor>& tensors, const Share& share) {
    const size_t first = tensors.size();
    slices_.clear();
    for (int64_t m = 0; m < share.microbatches; ++m) {
      slices_.push_back(slice(share.total(), share.first() + m));
      size_t count = 0;
      for_each_tensor(slices_.back(), [&](const at::Tensor& tensor) {
        if (m == 0) tensors.push_back({.tensor = {}, .position = cut_.position});
        if (first + count < tensors.size()) tensors[first + count].pieces.push_back(tensor);
        ++count;
      });
      if (count != tensors.size() - first) refuse_slices(cut_.position, tensors.size() - first, count, m);
    }
  }
  Picked pick(const Tensors& microbatch, size_t& next, int64_t m) {
    return with_tensors(slices_.at(static_cast<size_t>(m)), microbatch, next);
  }

 private:
  Slice slice(int64_t num_microbatches, int64_t m) {
    if (!cut_.is_whole) return original_.smp_slice(num_microbatches, m, cut_.axis);
    if constexpr (kIsOwnSlice) return original_;
    refuse_whole(cut_.position);
  }

  Arg& original_;
  Cut cut_;
  std::vector<Slice> slices_;
};

}  // namespace smp::step_internal
