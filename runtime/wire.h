// Bytes of control messages: numbers, strings and tensors, written and read in the same order. No objects, no pickle.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace smp::runtime {

class WireWriter {
 public:
  template <class T>
    requires std::is_arithmetic_v<T>
  void put(T number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  void put(std::string_view text) {
    put<uint64_t>(text.size());
    bytes_.append(text);
  }
  /// Geometry and data of a CPU tensor; is_wrapped_number is kept.
  void put(const at::Tensor& tensor);
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

/// Throws std::runtime_error when the bytes end early.
class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : bytes_(bytes) {}
  template <class T>
    requires std::is_arithmetic_v<T>
  T get() {
    T number;
    std::memcpy(&number, raw(sizeof number).data(), sizeof number);
    return number;
  }
  std::string get_string() { return std::string(raw(get<uint64_t>())); }
  at::Tensor get_tensor();
  bool at_end() const { return bytes_.empty(); }

 private:
  std::string_view raw(size_t num_bytes);
  std::string_view bytes_;
};

}  // namespace smp::runtime
