// Which operators an interceptor receives: on its own thread and on those to which LibTorch hands the thread's state.
#include "runtime/capture/interceptor.h"

#include <ATen/ThreadLocalState.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/types.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

namespace smp::runtime {
namespace {

class Names : public Interceptor {
 public:
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override {
    names.push_back(op.operator_name().name);
    pass_on(*this, op, stack);
  }
  int64_t count(const std::string& name) const { return std::count(names.begin(), names.end(), name); }
  std::vector<std::string> names;
};

TEST(Interceptor, ReceivesABackwardOnAThreadThatHasTheStateOfItsOwn) {
  const at::Tensor weight = torch::ones({2, 2}, torch::requires_grad());
  Names above, below;
  const InterceptScope scope(above);
  const InterceptScope lower(below, InterceptScope::Place::kBelowAll);
  const at::Tensor loss = torch::ones({2, 2}).mm(weight).sum();
  above.names.clear(), below.names.clear();
  const at::ThreadLocalState state;
  std::thread([&] {
    const at::ThreadLocalStateGuard own(state);
    torch::autograd::backward({loss}, {});
  }).join();
  EXPECT_EQ(above.count("aten::mm"), 1) << testing::PrintToString(above.names);
  EXPECT_EQ(below.names, above.names);
  EXPECT_TRUE(torch::equal(weight.grad(), torch::full({2, 2}, 2.0)));
}

TEST(Interceptor, ReceivesNothingOfAnotherThreadNorBeyondItsScope) {
  Names names;
  {
    const InterceptScope scope(names);
    std::thread([] { torch::ones({2}).add(1); }).join();
  }
  torch::ones({2}).add(1);
  EXPECT_EQ(names.names, std::vector<std::string>{});
}

}  // namespace
}  // namespace smp::runtime
