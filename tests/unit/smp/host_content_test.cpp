// Bodies that only ranks on the CPU take: there a tensor and its cpu() are one, and so are tensors of both kinds.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyCase;
using tests::CountNet;

std::vector<BodyCase<CountNet>> host_reads() {
  using Run = tests::BodyRun<CountNet>;
  return {
      {"FollowsWrites",
       [](const Run& run) {
         const at::Tensor output = run.forward(run.data);
         at::Tensor total = output.detach().sum().clone().cpu();
         total.add_(output.detach().abs().sum());
         run.trace.push_back(*total.data_ptr<float>());
         total.copy_(output.detach().max());
         run.trace.push_back(total.item<double>());
         total.mul_(2);
         run.trace.push_back(*total.data_ptr<float>());
         const at::Tensor again = output.detach().cpu();
         again[0].zero_();
         run.trace.push_back(again.cpu().abs().sum().item<double>());
         run.trace.push_back((output * total).to(at::kCPU, at::kDouble).sum().item<double>());
         return run.trained((output * total).square().mean() + (output * again).sum());
       }},
      {"FollowsWritesToWhatWasBrought",
       [](const Run& run) {
         const at::Tensor output = run.forward(run.data), here = output.detach() * 1, there = here.cpu(), first = there[0];
         here.mul_(2);
         run.trace.push_back(there.sum().item<double>());
         run.trace.push_back(*first.data_ptr<float>());
         here.add_(there);
         run.trace.push_back(there.data_ptr<float>()[1]);
         there.mul_(2);
         run.trace.push_back(here.sum().item<double>());
         const at::Tensor loss = (output * there).square().mean();
         return run.trained(*first.data_ptr<float>() > 0 ? loss : loss * 3);
       }},
      {"OfAParameter",
       [](const Run& run) {
         run.trace.push_back(run.net.first->bias.cpu().sum().item<double>());
         run.trace.push_back(run.net.first->bias.contiguous().sum().item<double>());
         const at::Tensor loss = (run.forward(run.data) * run.net.scale.cpu()).square().mean();
         return run.trained(loss);
       }},
      {"OfABufferFollowsWritesUnderAnotherName",
       [](const Run& run) {
         const at::Tensor here = run.net.count.cpu();
         run.net.count.data().add_(1);
         run.trace.push_back(here.sum().item<double>());
         return run.trained(run.forward(run.data).square().mean());
       }},
  };
}

using HostContent = tests::BodyTable<CountNet>;

TEST_P(HostContent, IsThatOfALoop) { expect_as_in_a_loop(); }

INSTANTIATE_TEST_SUITE_P(Bodies, HostContent, testing::Combine(testing::ValuesIn(host_reads()), testing::Values(1, 2)),
                         tests::name_on_ranks<BodyCase<CountNet>>);

struct TwoNamesNet : tests::TwoLayers {
  at::Tensor forward(const at::Tensor& x) { return last(first(x) * all.sum()); }
  at::Tensor all = register_buffer("all", torch::ones({3}));
  at::Tensor part = register_buffer("part", all.narrow(0, 1, 2));
};

TEST(HostContent, OfABufferIsThatOfItsOtherName) {
  for (const int ranks : {1, 2}) {
    tests::expect_as_in_a_loop<TwoNamesNet>({.ranks = ranks}, [](const tests::BodyRun<TwoNamesNet>& run) {
      {
        const at::NoGradGuard no_grad;
        run.net.all.add_(1);
      }
      run.trace.push_back(run.net.part.sum().item<double>());
      return run.trained(run.forward(run.data).square().mean());
    });
  }
}

}  // namespace
}  // namespace smp
