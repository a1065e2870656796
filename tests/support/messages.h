// Texts of errors, for tests that look into them.
#pragma once

#include <c10/util/Exception.h>

#include <functional>
#include <string>

namespace smp::support {

/// The text of the `Error` that `call` throws, without backtrace; "" when it throws nothing.
template <class Error = c10::Error>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    if constexpr (requires { error.what_without_backtrace(); }) {
      return error.what_without_backtrace();
    } else {
      return error.what();
    }
  }
  return "";
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace smp::support
