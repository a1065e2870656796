// Registers one boxed fallback on the capture key and hands each call to the thread's interceptor; runs of the autograd
// engine as well.
#include "runtime/capture/interceptor.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "runtime/libtorch/node_handle.h"

namespace smp::runtime {
namespace {

using torch::autograd::Engine;
using torch::autograd::variable_list;

// A C function pointer is all the dispatcher takes, so the receivers are found through the thread, in what LibTorch hands on
// to the threads that it has run a backward: the dispatch key goes there as well. It has no kind for others than itself;
// this one serves nothing but its own tests.
c10::DebugInfoKind kind() { return c10::DebugInfoKind::TEST_INFO_2; }  // no constant from LibTorch 2.15 on

struct Receivers : c10::DebugInfoBase {
  std::vector<Interceptor*> interceptors;  // the last receives the calls
};

const std::vector<Interceptor*>& interceptors() {
  static const std::vector<Interceptor*> none;
  const auto* receivers = static_cast<const Receivers*>(c10::ThreadLocalDebugInfo::get(kind()));
  return receivers == nullptr ? none : receivers->interceptors;
}

std::shared_ptr<Receivers> receivers_with(Interceptor& interceptor, InterceptScope::Place place) {
  auto receivers = std::make_shared<Receivers>();
  std::vector<Interceptor*>& all = receivers->interceptors = interceptors();
  all.insert(place == InterceptScope::Place::kAboveAll ? all.end() : all.begin(), &interceptor);
  return receivers;
}

void dispatch_to_interceptor(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
  TORCH_INTERNAL_ASSERT(!interceptors().empty(), op.operator_name(), " is to be intercepted by nobody");
  interceptors().back()->operator_called(op, *stack);
}

/// Runs nothing itself: what LibTorch asks its default engine for is done by the one that was the default before.
class AskingEngine : public Engine {
 public:
  explicit AskingEngine(Engine& engine) : engine_(engine) {}

  variable_list execute(const torch::autograd::edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    const bool is_asked = !interceptors().empty() && !c10::impl::tls_is_dispatch_key_excluded(kCaptureKey);
    if (is_asked) interceptors().back()->engine_called();
    return engine_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(const std::shared_ptr<torch::autograd::GraphTask>& task,
                                                                 NodeHandle root,
                                                                 torch::autograd::InputBuffer&& inputs) override {
    return engine_.execute_with_graph_task(task, std::move(root), std::move(inputs));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return engine_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return engine_.get_default_saved_variable_hooks();
  }

 private:
  Engine& engine_;
};

AskingEngine* asking_engine = nullptr;

}  // namespace

void install_interceptor() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never destroyed: deregistration at exit would race with other libraries' static destructors.
    static auto* library = new torch::Library(torch::Library::IMPL, "_", kCaptureKey, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFromBoxedFunction<&dispatch_to_interceptor>());
    asking_engine = new AskingEngine(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub([]() -> Engine& { return *asking_engine; });
  });
}

InterceptScope::InterceptScope(Interceptor& interceptor, Place place)
    : receivers_((install_interceptor(), kind()), receivers_with(interceptor, place)), include_(kCaptureKey) {}

InterceptScope::~InterceptScope() = default;

InterceptWithin::InterceptWithin(Interceptor& interceptor)
    : keys_(c10::impl::tls_local_dispatch_key_set().included_,
            c10::impl::tls_local_dispatch_key_set().excluded_.remove(kCaptureKey)),
      scope_(interceptor) {}

void pass_on(const Interceptor& from, const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const std::vector<Interceptor*>& all = interceptors();
  const auto own = std::find(all.begin(), all.end(), &from);
  TORCH_INTERNAL_ASSERT(own != all.end(), "an interceptor that received no call passes one on");
  own == all.begin() ? op.callBoxed(stack) : (*(own - 1))->operator_called(op, stack);
}

}  // namespace smp::runtime
