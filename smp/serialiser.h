// How objects become bytes: what smp::send and its kin transport, and what step bodies return beside tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Type.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "smp/fields.h"

namespace smp {

class Writer;
class Reader;

/// How a T is written and read. There are ones for at::Tensor, std::string, numbers, bools and enumerations, and for
/// std::vector, array, pair, tuple, map and optional of what has one; a struct with Fields needs none. For other types of
/// yours specialise it, reading in the order of writing:
///
///   template <>
///   struct smp::Serialiser<Vocabulary> {
///     static void write(smp::Writer& out, const Vocabulary& words) { out.put(words.list()); }
///     static Vocabulary read(smp::Reader& in) { return Vocabulary(in.get<std::vector<std::string>>()); }
///   };
template <class T>
struct Serialiser;

template <class T>
concept Serialisable = requires(Writer& out, Reader& in, const T& object) {
  Serialiser<T>::write(out, object);
  { Serialiser<T>::read(in) } -> std::convertible_to<T>;
};

/// T as error texts name it: "std::vector<double>".
template <class T>
std::string type_name() {
  if constexpr (requires { Serialiser<T>::name(); }) {
    return Serialiser<T>::name();
  } else {
    return c10::demangle(typeid(T).name());
  }
}

/// Objects within objects, such as a tree's: as deep as a stack can follow.
class Nesting {
 public:
  static constexpr int kMostDeep = 1000;
  /// Throws c10::ValueError.
  explicit Nesting(int& depth) : depth_(depth) {
    if (depth_ == kMostDeep) refuse();
    ++depth_;
  }
  ~Nesting() { --depth_; }
  Nesting(const Nesting&) = delete;
  Nesting& operator=(const Nesting&) = delete;

 private:
  [[noreturn]] static void refuse();
  int& depth_;
};

/// Bytes in the making.
class Writer {
 public:
  template <class T>
  void put(const T& object) {
    static_assert(
        Serialisable<T>,
        "smp: no Serialiser for the type T named here. Specialise smp::Fields<T> (a struct) or smp::Serialiser<T>.");
    const Nesting one_deeper(depth_);
    Serialiser<T>::write(*this, object);
  }
  /// The elements of a container, behind their number. Throws c10::ValueError when they have written less than one byte or
  /// tensor each: a Reader believes no number that is larger than what is left.
  template <class Elements, class Put>
  void put_elements(const Elements& elements, const Put& put_one) {
    put<uint64_t>(elements.size());
    const size_t before = num_written();
    for (const auto& element : elements) put_one(element);
    check_written(elements.size(), num_written() - before);
  }
  void put_bytes(const void* data, size_t num_bytes) { bytes_.append(static_cast<const char*>(data), num_bytes); }
  /// Sizes, dtype, strides of a dense tensor, and data; undefined ones too. Throws c10::ValueError for tensors that are
  /// not dense CPU tensors.
  void put_tensor(const at::Tensor& tensor);
  /// What was written; the Writer is empty afterwards.
  std::string take() { return std::exchange(bytes_, {}); }

  Writer() = default;
  /// Tensors go to `tensors` in their order, and no bytes of them are written.
  explicit Writer(std::vector<at::Tensor>& tensors) : tensors_(&tensors) {}

 private:
  size_t num_written() const { return bytes_.size() + (tensors_ == nullptr ? 0 : tensors_->size()); }
  static void check_written(size_t num_elements, size_t num_written);

  std::string bytes_;
  std::vector<at::Tensor>* tensors_ = nullptr;
  int depth_ = 0;
};

/// Reads what a Writer wrote, in the same order. Everything throws c10::ValueError where the bytes are others: they end
/// early, a number of elements is larger than what is left, a bool is neither 0 nor 1. An enumeration has any value of its
/// underlying type; a Serialiser of your own can check it.
class Reader {
 public:
  template <class T>
  T get() {
    static_assert(
        Serialisable<T>,
        "smp: no Serialiser for the type T named here. Specialise smp::Fields<T> (a struct) or smp::Serialiser<T>.");
    const Nesting one_deeper(depth_);
    return Serialiser<T>::read(*this);
  }
  /// What put_elements() wrote first: how many elements follow.
  uint64_t get_count();
  /// The next bytes; they live as long as those that the Reader was made from.
  std::string_view get_bytes(size_t num_bytes);
  bool get_bool();
  /// Has memory of its own.
  at::Tensor get_tensor();
  bool at_end() const { return bytes_.empty() && (tensors_ == nullptr || next_tensor_ == tensors_->size()); }
  /// Throws c10::ValueError when the Serialiser of `type` has left something. where: as its text names the bytes.
  void expect_end(const std::string& type, const char* where) const;

  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  /// For bytes of a Writer whose tensors went elsewhere: they come from there.
  Reader(std::string_view bytes, const std::vector<at::Tensor>& tensors) : bytes_(bytes), tensors_(&tensors) {}

 private:
  std::string_view bytes_;
  const std::vector<at::Tensor>* tensors_ = nullptr;
  size_t next_tensor_ = 0;
  int depth_ = 0;
};

template <>
struct Serialiser<at::Tensor> {
  static void write(Writer& out, const at::Tensor& tensor) { out.put_tensor(tensor); }
  static at::Tensor read(Reader& in) { return in.get_tensor(); }
  static std::string name() { return "at::Tensor"; }
};

template <class T>
  requires(std::is_arithmetic_v<T> || std::is_enum_v<T>)
struct Serialiser<T> {
  static void write(Writer& out, T number) { out.put_bytes(&number, sizeof number); }
  static T read(Reader& in) {
    if constexpr (std::is_same_v<T, bool>) {
      return in.get_bool();
    } else {
      T number{};
      in.get_bytes(sizeof number).copy(reinterpret_cast<char*>(&number), sizeof number);
      return number;
    }
  }
};

template <>
struct Serialiser<std::string> {
  static void write(Writer& out, const std::string& text) {
    out.put<uint64_t>(text.size());
    out.put_bytes(text.data(), text.size());
  }
  static std::string read(Reader& in) {
    const auto size = in.get<uint64_t>();
    return std::string(in.get_bytes(size));
  }
  static std::string name() { return "std::string"; }
};

template <Serialisable T>
struct Serialiser<std::vector<T>> {
  static void write(Writer& out, const std::vector<T>& elements) {
    out.put_elements(elements, [&out](const T& element) { out.put<T>(element); });
  }
  static std::vector<T> read(Reader& in) {
    std::vector<T> elements;
    for (auto left = in.get_count(); left > 0; --left) elements.push_back(in.get<T>());
    return elements;
  }
  static std::string name() { return "std::vector<" + type_name<T>() + ">"; }
};

template <Serialisable T, size_t N>
struct Serialiser<std::array<T, N>> {
  static void write(Writer& out, const std::array<T, N>& elements) {
    for (const T& element : elements) out.put(element);
  }
  // Braces fix the order of evaluation.
  static std::array<T, N> read(Reader& in) {
    return [&]<size_t... I>(std::index_sequence<I...>) {
      return std::array<T, N>{(static_cast<void>(I), in.get<T>())...};
    }(std::make_index_sequence<N>());
  }
  static std::string name() { return "std::array<" + type_name<T>() + ", " + std::to_string(N) + ">"; }
};

template <Serialisable T>
struct Serialiser<std::optional<T>> {
  static void write(Writer& out, const std::optional<T>& object) {
    out.put(object.has_value());
    if (object) out.put(*object);
  }
  static std::optional<T> read(Reader& in) {
    if (!in.get<bool>()) return std::nullopt;
    return in.get<T>();
  }
  static std::string name() { return "std::optional<" + type_name<T>() + ">"; }
};

template <Serialisable K, Serialisable T>
struct Serialiser<std::map<K, T>> {
  static void write(Writer& out, const std::map<K, T>& map) {
    out.put_elements(map, [&out](const auto& entry) {
      out.put(entry.first);
      out.put(entry.second);
    });
  }
  static std::map<K, T> read(Reader& in) {
    std::map<K, T> map;
    for (auto left = in.get_count(); left > 0; --left) {
      K key = in.get<K>();
      map.emplace(std::move(key), in.get<T>());
    }
    return map;
  }
  static std::string name() { return "std::map<" + type_name<K>() + ", " + type_name<T>() + ">"; }
};

template <Serialisable... Ts>
struct Serialiser<std::tuple<Ts...>> {
  static void write(Writer& out, const std::tuple<Ts...>& tuple) {
    std::apply([&](const Ts&... element) { (out.put(element), ...); }, tuple);
  }
  // Braces fix the order of evaluation.
  static std::tuple<Ts...> read(Reader& in) { return std::tuple<Ts...>{in.get<Ts>()...}; }
  static std::string name() {
    std::string names;
    ((names += (names.empty() ? "" : ", ") + type_name<Ts>()), ...);
    return "std::tuple<" + names + ">";
  }
};

template <Serialisable A, Serialisable B>
struct Serialiser<std::pair<A, B>> {
  static void write(Writer& out, const std::pair<A, B>& pair) {
    out.put(pair.first);
    out.put(pair.second);
  }
  static std::pair<A, B> read(Reader& in) { return std::pair<A, B>{in.get<A>(), in.get<B>()}; }
  static std::string name() { return "std::pair<" + type_name<A>() + ", " + type_name<B>() + ">"; }
};

template <HasFields T>
struct Serialiser<T> {
  static void write(Writer& out, const T& object) {
    std::apply([&](const auto&... field) { (out.put(field), ...); }, Fields<T>::of(object));
  }
  static T read(Reader& in) {
    static_assert(std::is_default_constructible_v<T>, "smp::Fields: expected a T that can be default-constructed.");
    T object{};
    std::apply([&](auto&... field) { ((field = in.get<std::remove_cvref_t<decltype(field)>>()), ...); },
               Fields<T>::of(object));
    return object;
  }
};

}  // namespace smp
