// Stages that a backward reaches in part or not at all.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using torch::nn::Linear;

struct EndsNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) { return last(between(torch::tanh(first(x)))); }
  virtual at::Tensor between(const at::Tensor& h) = 0;
};

at::Tensor view_without_gradients(const at::Tensor& h) {
  const at::NoGradGuard no_grad;
  return h.view_as(h);
}

/// Gradients come to the memory of the view, and no further.
struct ViewNet : EndsNet {
  at::Tensor between(const at::Tensor& h) override { return view_without_gradients((h * 1.0).relu_()); }
};

/// A view that says it requires a gradient, and has no function.
struct SumWithViewNet : EndsNet {
  at::Tensor between(const at::Tensor& h) override {
    return view_without_gradients((h * 1.0).tanh_()) + third(torch::ones({8}, h.options()));
  }
  Linear third = register_module("third", Linear(8, 8));
};

struct DetachedNet : EndsNet {
  at::Tensor between(const at::Tensor& h) override { return (h * 2).detach(); }
};

/// Not here: to() gives back its argument.
struct LookedAtNet : EndsNet {
  at::Tensor between(const at::Tensor& h) override {
    const at::NoGradGuard no_grad;
    (void)h.to(h.dtype()).contiguous().sum();
    return h;
  }
};

/// Below autograd, as kernels of LibTorch call operators.
struct BelowAutogradNet : EndsNet {
  at::Tensor between(const at::Tensor& h) override {
    at::Tensor product, written = h * 1.0, ones;
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      product = h * last->weight[0].sum();
      written = written.neg();
      ones = at::ones_like(h);
    }
    return h + product * ones + written;
  }
};

class GradientEnds : public testing::TestWithParam<std::tuple<int, StageKind>> {
 protected:
  template <class Net>
  static void check() {
    const auto [ranks, stage] = GetParam();
    tests::expect_as_in_a_loop<Net>({.ranks = ranks, .config = {.microbatches = 3, .stage = stage}}, tests::train_once);
  }
};

TEST_P(GradientEnds, AtAViewThatIsMadeWithout) { check<ViewNet>(); }
TEST_P(GradientEnds, AtAViewThatIsAddedTo) { check<SumWithViewNet>(); }
TEST_P(GradientEnds, AtADetach) { check<DetachedNet>(); }
TEST_P(GradientEnds, BelowAutograd) { check<BelowAutogradNet>(); }
TEST_P(GradientEnds, NotWhereAValueIsLookedAt) { check<LookedAtNet>(); }

INSTANTIATE_TEST_SUITE_P(Ranks, GradientEnds,
                         testing::Combine(testing::Values(1, 2, 3, 4),
                                          testing::Values(StageKind::kTape, StageKind::kAutograd)));

}  // namespace
}  // namespace smp
