// Owns the key of saves, and what it makes of their content.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace smp::engine {

/// What is in the file of Config::save_key_file; "" for no file. Throws c10::Error where it is not a regular file of this
/// user that nobody else can read or write, or has fewer than 32 bytes.
std::string read_save_key(const std::string& path);

/// HMAC-SHA256 of all that is added (RFC 2104).
class Signature {
 public:
  explicit Signature(std::string_view key);
  ~Signature();
  Signature(const Signature&) = delete;
  Signature& operator=(const Signature&) = delete;

  void add(std::string_view bytes);
  /// In hexadecimal digits; nothing may be added afterwards.
  std::string text();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// In a time that does not depend on where they differ.
bool are_equal_signatures(std::string_view a, std::string_view b);

}  // namespace smp::engine
