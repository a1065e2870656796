// The exit codes of a process that a failure ends, and errors that know theirs.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <utility>

namespace smp {

/// docs/reliability.md. Those that are not here are the program's own.
enum class ExitCode : int {
  kFailed = 1,      ///< an exception of the program's own, or any other
  kUsage = 2,       ///< usage or configuration
  kPeerFailed = 3,  ///< another rank has failed, and says why
  kHang = 4,        ///< a wait took too long
  kDesync = 5,      ///< ranks are in different calls
  kNumerics = 6,    ///< NaN, infinity, or replicas that differ
  kCheckpoint = 7,  ///< a save that cannot be written or loaded
  kOutOfMemory = 8,
};

/// A base of errors that know their exit code, whatever else they are.
class HasExitCode {
 public:
  explicit HasExitCode(ExitCode code) : code_(code) {}
  HasExitCode(const HasExitCode&) = default;
  HasExitCode& operator=(const HasExitCode&) = default;
  virtual ~HasExitCode() = default;

  ExitCode exit_code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

/// An Error, caught as that, with an exit code.
template <class Error>
class Coded final : public Error, public HasExitCode {
 public:
  Coded(Error error, ExitCode code) : Error(std::move(error)), HasExitCode(code) {}
};

/// What fn() returns. Its refusals, c10::ValueError and plain c10::Error, get `code` unless they have one.
template <class Fn>
decltype(auto) with_exit_code(ExitCode code, const Fn& fn) {
  try {
    return fn();
  } catch (const HasExitCode&) {
    throw;
  } catch (const c10::ValueError& error) {
    throw Coded<c10::ValueError>(error, code);
  } catch (const c10::Error& error) {
    if (typeid(error) != typeid(c10::Error)) throw;
    throw Coded<c10::Error>(error, code);
  }
}

/// Of a process that ends by this exception.
ExitCode exit_code_of(const std::exception_ptr& exception);

}  // namespace smp
