// Which failure ends a process with which code.
#include "runtime/watch/exit_code.h"

#include <new>
#include <string_view>

namespace smp {
namespace {

// What LibTorch's allocators say; on the CPU only by a plain c10::Error, which Python hands on as a text.
bool tells_of_memory(std::string_view text) {
  return text.find("DefaultCPUAllocator: ") != text.npos || text.find("out of memory. Tried to allocate") != text.npos;
}

}  // namespace

ExitCode exit_code_of(const std::exception_ptr& exception) {
  if (!exception) return ExitCode::kFailed;
  try {
    std::rethrow_exception(exception);
  } catch (const HasExitCode& error) {
    return error.exit_code();
  } catch (const std::bad_alloc&) {
    return ExitCode::kOutOfMemory;
  } catch (const std::exception& error) {
    return tells_of_memory(error.what()) ? ExitCode::kOutOfMemory : ExitCode::kFailed;
  } catch (...) {
    return ExitCode::kFailed;
  }
}

}  // namespace smp
