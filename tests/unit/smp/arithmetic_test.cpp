// LibTorch's switches for the whole process, which decide by which kernels operators compute.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::message_of;
using tests::make_net;
using tests::rows;
using Model = DistributedModel<tests::SmallNet>;

class WithoutOneDnn {
 public:
  WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(false); }
  ~WithoutOneDnn() { at::globalContext().setUserEnabledMkldnn(true); }
  WithoutOneDnn(const WithoutOneDnn&) = delete;
  WithoutOneDnn& operator=(const WithoutOneDnn&) = delete;
};

// Stages would compute without it.
TEST(Arithmetic, ThatTheBodyChangesIsRefused) {
  tests::run_smp_ranks(2, {.microbatches = 2}, [] {
    Model model(make_net());
    const at::Tensor data = rows(4, 8, 1);
    auto for_a_while = smp::step([&](at::Tensor part) {
      const at::Tensor twice = part * 2;
      const WithoutOneDnn off;
      return model(twice);
    });
    const std::string within = message_of([&] { for_a_while(data); });
    EXPECT_NE(within.find("before any parameter was used: the step body has changed "
                          "torch.backends.mkldnn.enabled, with which"),
              std::string::npos)
        << within;
    bool turns_off = false;
    auto for_good = smp::step([&](at::Tensor part) {
      const at::Tensor output = model(part);
      if (turns_off) at::globalContext().setUserEnabledMkldnn(false);
      return output;
    });
    for_good(data);
    turns_off = true;  // in a run that equals a recording
    const std::string behind = message_of([&] { for_good(data); });
    EXPECT_NE(behind.find("the end of the body"), std::string::npos) << behind;
    turns_off = false;
    at::globalContext().setUserEnabledMkldnn(true);
  });
}

}  // namespace
}  // namespace smp
