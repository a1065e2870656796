// Bytes of control messages: numbers, strings and tensors, written and read in the same order. No objects, no pickle.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// A struct that says what of it travels: `static auto members(auto& self) { return std::tie(self.first, self.second); }`.
template <class T>
concept Travels = requires(T& self) { T::members(self); };

class WireWriter {
 public:
  template <class T>
    requires std::is_arithmetic_v<T>
  void put(T number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  template <class T>
    requires std::is_enum_v<T>
  void put(T enumerator) {
    put(static_cast<std::underlying_type_t<T>>(enumerator));
  }
  void put(std::string_view text) {
    put<uint64_t>(text.size());
    bytes_.append(text);
  }
  /// Geometry and data of a tensor of the host or of the rank's device, where its reader gets it; is_wrapped_number is kept.
  void put(const at::Tensor& tensor);
  /// One after the other: the members of a struct, by std::tie.
  template <class... T>
  void put(const std::tuple<T...>& values) {
    std::apply([this](const auto&... each) { (this->put(each), ...); }, values);
  }
  template <Travels T>
  void put(const T& value) {
    put(T::members(value));
  }
  /// How many, then each.
  template <class T>
  void put(const std::vector<T>& all) {
    put(static_cast<uint32_t>(all.size()));
    for (const T& each : all) put(each);
  }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Reads bytes for which nobody vouches. Whatever asks for memory is first compared with the bytes that are left, so that a
/// message takes a small multiple of its length at most. Everything throws std::runtime_error that says what was expected,
/// what came, and at which byte. There are readers within read_all() only, so that none leaves bytes unread.
class WireReader {
 public:
  /// A bool is one byte, 0 or 1.
  template <class T>
    requires std::is_arithmetic_v<T>
  T get() {
    if constexpr (std::is_same_v<T, bool>) {
      return get_between<uint8_t>(0, 1) != 0;
    } else {
      T number;
      const std::string_view bytes = raw(sizeof number);
      std::memcpy(&number, bytes.data(), bytes.size());
      return number;
    }
  }
  template <std::integral T>
  T get_between(T low, T high) {
    const T number = get<T>();
    if (number < low || number > high) {
      refuse("a number from " + std::to_string(low) + " to " + std::to_string(high), std::to_string(number), sizeof(T));
    }
    return number;
  }
  template <std::integral T>
  T get_at_least(T least) {
    return get_between(least, std::numeric_limits<T>::max());
  }
  /// Of an enumeration whose enumerators are 0, 1, ... `last`.
  template <class T>
    requires std::is_enum_v<T>
  T get_enumerator(T last) {
    using Number = std::underlying_type_t<T>;
    return static_cast<T>(get_between<Number>(0, static_cast<Number>(last)));
  }
  /// How many items follow, each of `least_bytes` (> 0) or more.
  template <std::integral Count>
  size_t get_count(size_t least_bytes) {
    const auto count = get_at_least<Count>(0);
    check_room(static_cast<uint64_t>(count), least_bytes);
    return static_cast<size_t>(count);
  }
  /// Lives as long as the message.
  std::string_view get_text() { return raw(get_count<uint64_t>(1)); }
  std::string get_string() { return std::string(get_text()); }
  /// A type whose tensors travel.
  c10::ScalarType get_dtype();
  at::Tensor get_tensor();
  /// What was put as a tuple, into the variables that the tuple refers to: all but tensors. `last_of(T)` is an enumeration's
  /// last enumerator.
  template <class... T>
  void get_into(const std::tuple<T&...>& values) {
    std::apply([this](auto&... each) { (this->get_into(each), ...); }, values);
  }
  template <Travels T>
  void get_into(T& value) {
    get_into(T::members(value));
  }
  bool at_end() const { return left_.empty(); }

 private:
  template <class Read>
  friend auto read_all(std::string_view bytes, std::string_view what, const Read& read);
  WireReader(std::string_view bytes, std::string_view what) : what_(what), all_(bytes), left_(bytes) {}

  void get_into(std::string& text) { text = get_string(); }
  template <class T>
  void get_into(T& number) {
    if constexpr (std::is_enum_v<T>) {
      number = get_enumerator(last_of(number));
    } else {
      number = get<T>();
    }
  }
  template <class T>
  void get_into(std::vector<T>& all) {
    for (auto left = get_count<uint32_t>(1); left > 0; --left) get_into(all.emplace_back());
  }
  std::string_view raw(size_t num_bytes);
  /// The one place that judges whether a message is long enough for what it says.
  void check_room(uint64_t count, size_t least_bytes) const;
  void expect_end() const;
  /// bytes_back: how far before the next byte the fault lies.
  [[noreturn]] void refuse(const std::string& expected, const std::string& got, size_t bytes_back = 0) const;

  std::string_view what_, all_, left_;
};

/// Of a tensor in a message: type, wrapped number, dimensions, length of the data.
inline constexpr size_t kLeastTensorBytes = sizeof(c10::ScalarType) + sizeof(bool) + sizeof(uint32_t) + sizeof(uint64_t);

/// What `read(WireReader&)` makes of `bytes`, of which it must leave none. what: as error texts name it, "step message".
template <class Read>
auto read_all(std::string_view bytes, std::string_view what, const Read& read) {
  WireReader in(bytes, what);
  if constexpr (std::is_void_v<decltype(read(in))>) {
    read(in);
    in.expect_end();
  } else {
    auto result = read(in);
    in.expect_end();
    return result;
  }
}

template <Travels T>
std::string encode(const T& value) {
  WireWriter out;
  out.put(value);
  return out.take();
}
template <Travels T>
T decode(std::string_view bytes, std::string_view what) {
  return read_all(bytes, what, [](WireReader& in) {
    T value;
    in.get_into(value);
    return value;
  });
}
/// Every rank's, by rank. Collective over `group`.
template <Travels T>
std::vector<T> gather(const T& own, Transport& group, std::string_view what) {
  std::vector<T> all;
  for (const std::string& bytes : group.all_gather(encode(own))) all.push_back(decode<T>(bytes, what));
  return all;
}

/// A message that holds one tensor.
at::Tensor read_tensor(std::string_view bytes, std::string_view what);

}  // namespace smp::runtime
