// Registers one boxed fallback on the capture key and hands each call to the thread's interceptor.
#include "runtime/capture/interceptor.h"

#include <torch/library.h>

#include <memory>
#include <mutex>

namespace smp::runtime {
namespace {

// A C function pointer is all the dispatcher takes, so the receiver is found through the thread.
thread_local Interceptor* current_interceptor = nullptr;

void dispatch_to_interceptor(const c10::OperatorHandle& op, c10::DispatchKeySet,
                             torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  // Ghosts carry the key themselves, so a ghost that left its body, or its thread, still arrives here.
  TORCH_CHECK(current_interceptor != nullptr, op.operator_name(),
              ": expected a tensor with data, got a ghost of a step body that has ended (or of another thread's "
              "body). Inside a step body tensors have shapes but no data; return what you need from the body and "
              "read it from the StepOutput.");
  current_interceptor->operator_called(op, *stack);
}

}  // namespace

void install_interceptor() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: deregistration at exit would race with other libraries' static destructors.
    static auto* library =
        new torch::Library(torch::Library::IMPL, "_", kCaptureKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch_to_interceptor>());
  });
}

InterceptScope::InterceptScope(Interceptor& interceptor)
    : previous_((install_interceptor(), current_interceptor)), include_(kCaptureKey) {
  current_interceptor = &interceptor;
}

InterceptScope::~InterceptScope() { current_interceptor = previous_; }

}  // namespace smp::runtime
