// Registers one boxed fallback on the capture key and hands each call to the thread's interceptor.
#include "runtime/capture/interceptor.h"

#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

namespace smp::runtime {
namespace {

// A C function pointer is all the dispatcher takes, so the receiver is found through the thread.
thread_local std::vector<Interceptor*> interceptors;  // the last receives the calls

void dispatch_to_interceptor(const c10::OperatorHandle& op, c10::DispatchKeySet,
                             torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  // Ghosts carry the key themselves, so a ghost that left its body, or its thread, still arrives here.
  TORCH_CHECK(!interceptors.empty(), op.operator_name(),
              ": expected a tensor with data, got a ghost of a step body that has ended (or of another thread's "
              "body). Inside a step body tensors have shapes but no data; return what you need from the body and "
              "read it from the StepOutput.");
  interceptors.back()->operator_called(op, *stack);
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

InterceptScope::InterceptScope(Interceptor& interceptor, Place place)
    : interceptor_((install_interceptor(), interceptor)), include_(kCaptureKey) {
  interceptors.insert(place == Place::kAboveAll ? interceptors.end() : interceptors.begin(), &interceptor);
}

InterceptScope::~InterceptScope() {
  interceptors.erase(std::find(interceptors.begin(), interceptors.end(), &interceptor_));
}

InterceptWithin::InterceptWithin(Interceptor& interceptor)
    : keys_(c10::impl::tls_local_dispatch_key_set().included_,
            c10::impl::tls_local_dispatch_key_set().excluded_.remove(kCaptureKey)),
      scope_(interceptor) {}

void pass_on(const Interceptor& from, const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const auto own = std::find(interceptors.begin(), interceptors.end(), &from);
  TORCH_INTERNAL_ASSERT(own != interceptors.end(), "an interceptor that received no call passes one on");
  own == interceptors.begin() ? op.callBoxed(stack) : (*(own - 1))->operator_called(op, stack);
}

}  // namespace smp::runtime
