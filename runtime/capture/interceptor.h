// The dispatcher key that lets smp see every operator a thread calls. Owns the registration, not what is done with it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/ThreadLocalDebugInfo.h>

namespace smp::runtime {

/// Above autograd and autocast, so that operators arrive as the body calls them, undecomposed; LibTorch itself registers
/// nothing on it. A key of its own would need another LibTorch.
inline constexpr c10::DispatchKey kCaptureKey = c10::DispatchKey::DeferredInit;

/// Receives every operator call of the thread inside an InterceptScope, composites undecomposed, before autocast
/// and autograd see it. Operators called while `operator_called` runs go straight to LibTorch.
class Interceptor {
 public:
  Interceptor() = default;
  virtual ~Interceptor() = default;
  Interceptor(const Interceptor&) = delete;
  Interceptor& operator=(const Interceptor&) = delete;
  /// The call's arguments lie on top of `stack`; replace them by the results, e.g. with op.callBoxed(stack).
  virtual void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) = 0;
  /// The thread is about to run LibTorch's autograd engine (torch::autograd::grad, backward), for which there is no
  /// operator; not from within an operator. May throw.
  virtual void engine_called() {}
};

/// Turns interception on for this thread, and for those to which LibTorch hands its state (at::ThreadLocalState): backwards
/// on other devices than the CPU run on such threads. Scopes nest strictly; the innermost receives the calls, one below all
/// others only what these pass on.
class InterceptScope {
 public:
  enum class Place { kAboveAll, kBelowAll };
  explicit InterceptScope(Interceptor& interceptor, Place place = Place::kAboveAll);
  ~InterceptScope();
  InterceptScope(const InterceptScope&) = delete;
  InterceptScope& operator=(const InterceptScope&) = delete;

 private:
  c10::DebugInfoGuard receivers_;
  c10::impl::IncludeDispatchKeyGuard include_;
};

/// Interception within the handling of an intercepted operator, for what that is made of.
class InterceptWithin {
 public:
  explicit InterceptWithin(Interceptor& interceptor);

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  InterceptScope scope_;
};

/// For an interceptor that only looks: does what would happen without it.
void pass_on(const Interceptor& from, const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Registers the fallback, and an autograd engine that asks the thread's interceptor and then has the one before it run,
/// once per process (2 ms); InterceptScope calls it. Thread-safe. Throws c10::Error if another library has taken the key.
void install_interceptor();

}  // namespace smp::runtime
