// LibTorch's switches for the whole process, which decide by which kernels operators compute.
#include <ATen/Context.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"
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

// Nothing but the backward would compute with it.
TEST(Arithmetic, ThatIsOfTheBackwardAloneIsRefused) {
  tests::run_smp_ranks(1, {.microbatches = 2}, [] {
    Model model(make_net());
    const at::Tensor data = rows(4, 8, 1);
    bool changes = false;
    auto step = smp::step([&](at::Tensor part) {
      const at::Tensor loss = model(part).square().mean();
      std::optional<WithoutOneDnn> off;
      if (changes) off.emplace();
      model.backward(loss);
      return loss;
    });
    step(data);
    changes = true;  // in a run that equals a recording, too
    const std::string message = message_of([&] { step(data); });
    EXPECT_NE(message.find("backward, in or after"), std::string::npos) << message;
  });
}

// What the body makes would be of another dtype on the stages.
TEST(Arithmetic, OfAnotherDefaultDtypeIsRefused) {
  tests::run_smp_ranks(1, {.microbatches = 2}, [] {
    Model model(make_net());
    auto step = smp::step([&](at::Tensor part) {
      torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
      const at::Tensor factors = torch::ones({4});
      torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
      return model(part) * factors;
    });
    const std::string message = message_of([&] { step(rows(4, 8, 1)); });
    torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    EXPECT_NE(message.find("aten::ones, before any parameter was used: the step body has changed torch.set_default_dtype"),
              std::string::npos)
        << message;
  });
}

// A tape holds the operator that was chosen.
TEST(Arithmetic, ThatChangesBetweenStepsIsFollowedByTapes) {
  tests::run_smp_ranks(1, {.microbatches = 2}, [] {
    const auto net = make_net();
    Model model(net);
    const at::Tensor data = rows(128, 8, 1);
    const auto attended = [](const at::Tensor& x) {
      const at::Tensor heads = x.view({1, 1, -1, 4}) * 10;
      return at::scaled_dot_product_attention(heads, heads, heads);
    };
    auto step = smp::step([&](at::Tensor part) {
      const at::Tensor output = attended(model(part));
      model.backward(output.square().mean());
      return output;
    });
    const auto expected = [&] { return attended(net->forward(data.chunk(2)[1])).detach(); };
    const at::Tensor flash = expected();
    at::globalContext().setSDPUseFlash(false);
    const at::Tensor math = expected();
    EXPECT_FALSE(at::equal(flash, math));
    for (const bool is_flash : {true, false, true}) {
      at::globalContext().setSDPUseFlash(is_flash);
      for (int k = 0; k < 6; ++k) {
        support::expect_bit_equal(step(data)[1], is_flash ? flash : math, "output of step " + std::to_string(k));
      }
      EXPECT_GT(support::stage_reports().at(0).num_taped, 0);
    }
  });
}

}  // namespace
}  // namespace smp
