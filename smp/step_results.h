// From what a step body returns for each microbatch to what the step returns on every rank.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "smp/serialiser.h"
#include "smp/step_arguments.h"
#include "smp/step_call.h"

namespace smp {

namespace step_internal {

/// What becomes of a T that a body returns: gathered from the microbatches, in order. What holds no tensors becomes one
/// entry per microbatch.
template <class T>
struct Gathered {
  static_assert(!holds_tensors<T>,
                "smp::step: expected a body to return tensors, std::vector, array, map, optional, pair or tuple of them, "
                "structs with smp::Fields, or what has an smp::Serialiser, got the type T named here.");
  using Type = std::vector<T>;
  static Type gather(const std::vector<const T*>& parts) {
    Type values;
    for (const T* part : parts) values.push_back(*part);
    return values;
  }
};
template <class T>
using GatheredType = typename Gathered<T>::Type;

/// `pick(part)` of each, gathered.
template <class Part, class T, class Pick>
GatheredType<Part> gather_parts(const std::vector<const T*>& parts, const Pick& pick) {
  std::vector<const Part*> picked;
  for (const T* part : parts) picked.push_back(&pick(*part));
  return Gathered<Part>::gather(picked);
}

/// Throws c10::ValueError: microbatch `m` has other elements than microbatch 0.
[[noreturn]] void refuse_structure(size_t m);

}  // namespace step_internal

/// One S per microbatch: what a step returns for a struct with smp::Fields that its body returns. Every rank of the pipeline
/// holds the same.
///
///   struct Result { at::Tensor loss; int64_t num_words; };          // with smp::Fields
///   smp::StructOutput<Result> result = train_step(words);
///   at::Tensor loss = result.of(&Result::loss).reduce_mean();       // of a tensor: a StepOutput
///   int64_t first = result.of(&Result::num_words)[0];               // of anything else: a std::vector
template <class S>
class StructOutput {
 public:
  StructOutput() = default;
  explicit StructOutput(std::vector<S> outputs) : outputs_(std::move(outputs)) {}

  /// Number of microbatches in the step that produced this.
  int64_t size() const { return static_cast<int64_t>(outputs_.size()); }
  /// The struct of microbatch `m`, 0 <= m < size(). Throws c10::IndexError otherwise.
  const S& operator[](int64_t m) const {
    TORCH_CHECK_INDEX(m >= 0 && m < size(), "StructOutput: expected a microbatch in [0, ", size(), "), got ", m, ".");
    return outputs_[static_cast<size_t>(m)];
  }
  /// All of them, by microbatch.
  const std::vector<S>& outputs() const { return outputs_; }

  /// One member, as a step returns it whose body returns that member alone. Throws c10::ValueError where it is a container
  /// of tensors that has other elements in one microbatch than in another.
  template <class Member>
  auto of(Member S::* member) const {
    std::vector<const S*> parts;
    for (const S& output : outputs_) parts.push_back(&output);
    return step_internal::gather_parts<Member>(parts, [member](const S& part) -> const Member& { return part.*member; });
  }

 private:
  std::vector<S> outputs_;
};

namespace step_internal {

template <>
struct Gathered<at::Tensor> {
  using Type = StepOutput;
  static Type gather(const std::vector<const at::Tensor*>& parts) {
    Tensors tensors;
    for (const at::Tensor* part : parts) tensors.push_back(*part);
    return StepOutput(std::move(tensors));
  }
};

template <HasFields S>
struct Gathered<S> {
  using Type = StructOutput<S>;
  static Type gather(const std::vector<const S*>& parts) {
    std::vector<S> structs;
    for (const S* part : parts) structs.push_back(*part);
    return StructOutput<S>(std::move(structs));
  }
};

template <class... Ts>
struct Gathered<std::tuple<Ts...>> {
  using Type = std::tuple<GatheredType<Ts>...>;
  static Type gather(const std::vector<const std::tuple<Ts...>*>& parts) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return Type{gather_parts<Ts>(parts, [](const auto& part) -> const Ts& { return std::get<I>(part); })...};
    }(std::index_sequence_for<Ts...>());
  }
};

template <class A, class B>
struct Gathered<std::pair<A, B>> {
  using Type = std::pair<GatheredType<A>, GatheredType<B>>;
  static Type gather(const std::vector<const std::pair<A, B>*>& parts) {
    return {gather_parts<A>(parts, [](const auto& part) -> const A& { return part.first; }),
            gather_parts<B>(parts, [](const auto& part) -> const B& { return part.second; })};
  }
};

template <class T>
  requires holds_tensors<T>
struct Gathered<std::vector<T>> {
  using Type = std::vector<GatheredType<T>>;
  static Type gather(const std::vector<const std::vector<T>*>& parts) {
    for (size_t m = 1; m < parts.size(); ++m) {
      if (parts[m]->size() != parts[0]->size()) refuse_structure(m);
    }
    Type gathered;
    for (size_t i = 0; !parts.empty() && i < parts[0]->size(); ++i) {
      gathered.push_back(gather_parts<T>(parts, [i](const auto& part) -> const T& { return part[i]; }));
    }
    return gathered;
  }
};

template <class T, size_t N>
  requires holds_tensors<T>
struct Gathered<std::array<T, N>> {
  using Type = std::array<GatheredType<T>, N>;
  static Type gather(const std::vector<const std::array<T, N>*>& parts) {
    Type gathered;
    for (size_t i = 0; i < N; ++i) {
      gathered[i] = gather_parts<T>(parts, [i](const auto& part) -> const T& { return part[i]; });
    }
    return gathered;
  }
};

template <class K, class T>
  requires holds_tensors<T>
struct Gathered<std::map<K, T>> {
  using Type = std::map<K, GatheredType<T>>;
  static Type gather(const std::vector<const std::map<K, T>*>& parts) {
    for (size_t m = 1; m < parts.size(); ++m) {
      const bool has_same_keys = std::equal(parts[0]->begin(), parts[0]->end(), parts[m]->begin(), parts[m]->end(),
                                            [](const auto& a, const auto& b) { return a.first == b.first; });
      if (!has_same_keys) refuse_structure(m);
    }
    Type gathered;
    if (parts.empty()) return gathered;
    for (const auto& [key, value] : *parts[0]) {
      gathered.emplace(key, gather_parts<T>(parts, [&](const auto& part) -> const T& { return part.at(key); }));
    }
    return gathered;
  }
};

template <class T>
  requires holds_tensors<T>
struct Gathered<std::optional<T>> {
  using Type = std::optional<GatheredType<T>>;
  static Type gather(const std::vector<const std::optional<T>*>& parts) {
    for (size_t m = 1; m < parts.size(); ++m) {
      if (parts[m]->has_value() != parts[0]->has_value()) refuse_structure(m);
    }
    if (parts.empty() || !*parts[0]) return std::nullopt;
    return gather_parts<T>(parts, [](const auto& part) -> const T& { return *part; });
  }
};

/// Is all that a T holds tensors, in a number that the type tells? Then nothing but tensors travels.
template <class T>
inline constexpr bool is_tensors_only = std::is_same_v<T, at::Tensor>;
template <class... Ts>
inline constexpr bool is_tensors_only<std::tuple<Ts...>> = (is_tensors_only<Ts> && ...);
template <class A, class B>
inline constexpr bool is_tensors_only<std::pair<A, B>> = is_tensors_only<A> && is_tensors_only<B>;
template <class T, size_t N>
inline constexpr bool is_tensors_only<std::array<T, N>> = is_tensors_only<T>;
template <HasFields S>
inline constexpr bool is_tensors_only<S> = []<class... Ts>(std::type_identity<std::tuple<Ts...>>) {
  return (is_tensors_only<std::remove_cvref_t<Ts>> && ...);
}(std::type_identity<decltype(Fields<S>::of(std::declval<S&>()))>());

/// Is all that a T holds tensors, in containers whose sizes, keys and fill are all that there is to tell?
template <class T>
inline constexpr bool is_structure_only = is_tensors_only<T>;
template <class... Ts>
inline constexpr bool is_structure_only<std::tuple<Ts...>> = (is_structure_only<Ts> && ...);
template <class A, class B>
inline constexpr bool is_structure_only<std::pair<A, B>> = is_structure_only<A> && is_structure_only<B>;
template <class T>
inline constexpr bool is_structure_only<std::vector<T>> = is_structure_only<T>;
template <class T, size_t N>
inline constexpr bool is_structure_only<std::array<T, N>> = is_structure_only<T>;
template <class K, class T>
inline constexpr bool is_structure_only<std::map<K, T>> = is_structure_only<T>;
template <class T>
inline constexpr bool is_structure_only<std::optional<T>> = is_structure_only<T>;

/// A tuple of references (std::tie) is returned as a tuple of values.
template <class T>
struct Plain {
  using Type = T;
};
template <class... Ts>
struct Plain<std::tuple<Ts...>> {
  using Type = std::tuple<std::remove_cvref_t<Ts>...>;
};

/// What bodies return: Result is what the body returns, without references.
template <class Result>
class Returned {
 public:
  using Value = typename Plain<Result>::Type;
  static constexpr bool kIsPlain = is_tensors_only<Value> || std::is_same_v<Value, Tensors>;
  /// What travels beside tensors: bytes for each microbatch, or the same for all.
  static constexpr bool kHasStructure = !kIsPlain && is_structure_only<Value>;
  static constexpr bool kHasValues = !kIsPlain && !kHasStructure;

  /// The tensors of microbatch m, on the leader; keeps the rest. Throws c10::ValueError when its containers have other
  /// elements than those of microbatch 0, or a Serialiser reads other than it writes, so that the step is refused before
  /// anything runs.
  Tensors take(const Value& value, int64_t m) {
    Tensors tensors;
    Writer out(tensors);
    out.put(value);
    const auto index = static_cast<size_t>(m);
    values_.resize(index + 1);
    values_[index] = out.take();
    if constexpr (kHasValues && !holds_tensors<Value>) read(values_[index], tensors);
    if constexpr (!kIsPlain && holds_tensors<Value>) {
      if (m > 0) Gathered<Value>::gather({&*first_, &value});
      // Its containers are what counts; its ghosts must not outlive the body.
      if (m == 0) first_ = read(values_[0], Tensors(tensors.size()));
    }
    return tensors;
  }
  std::vector<std::string> take_values() { return std::exchange(values_, {}); }
  std::string take_structure() { return take_values().at(0); }

  /// On every rank.
  static GatheredType<Value> make(Results&& results) {
    if constexpr (std::is_same_v<Value, at::Tensor>) {
      return std::move(results.tensors.at(0));
    } else if constexpr (std::is_same_v<Value, Tensors>) {
      return std::move(results.tensors);
    } else {
      return gather(results);
    }
  }

 private:
  static Value read(std::string_view bytes, const Tensors& tensors) {
    Reader in(bytes, tensors);
    Value value = in.get<Value>();
    in.expect_end(type_name<Value>(), "step results");
    return value;
  }

  static GatheredType<Value> gather(const Results& results) {
    const size_t num_microbatches = kHasValues ? results.values.size() : results.num_microbatches;
    std::vector<Value> values;
    values.reserve(num_microbatches);
    for (size_t m = 0; m < num_microbatches; ++m) {
      Tensors tensors;
      for (const StepOutput& output : results.tensors) tensors.push_back(output.outputs()[m]);
      values.push_back(read(kHasValues ? results.values[m] : results.payload, tensors));
    }
    std::vector<const Value*> parts;
    for (const Value& value : values) parts.push_back(&value);
    return Gathered<Value>::gather(parts);
  }

  std::optional<Value> first_;  // what microbatch 0 returned, without its tensors
  std::vector<std::string> values_;
};

template <>
class Returned<void> {
 public:
  static constexpr bool kHasValues = false, kHasStructure = false;
  static void make(Results&&) {}
};

}  // namespace step_internal
}  // namespace smp
