// Bodies on a GPU that bring tensors to the host, compute there and go back, against the same code in a plain loop.
#include <ATen/autocast_mode.h>

#include <sstream>

#include "tests/support/autocast.h"
#include "tests/support/messages.h"
#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using tests::BodyRun;
using tests::SmallNet;

at::Device gpu() { return runtime::this_ranks_device().current(); }

class HostTensors : public testing::TestWithParam<int> {
 protected:
  static void check(const tests::LoopBody<SmallNet>& body) {
    tests::expect_as_in_a_loop<SmallNet>({.ranks = GetParam()}, body);
  }
  static at::Tensor trained(const BodyRun<SmallNet>& run, const at::Tensor& loss) {
    run.backward(loss);
    return loss;
  }
  static void note(const BodyRun<SmallNet>& run, const at::Tensor& tensor) {
    run.trace.push_back(tensor.sum().item<double>());
    run.trace.push_back(tensor.is_cpu());
  }
};

TEST_P(HostTensors, AreNotTheTensorsThatTheyAreCopiesOf) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), x = output.detach() * 1, there = x.cpu(), seen = x.cpu();
    there.mul_(2);
    note(run, there);
    note(run, x);
    x.mul_(3);
    note(run, seen);
    const at::Tensor back = there.to(gpu());
    back.add_(1);
    note(run, there);
    note(run, back);
    return trained(run, (output * x).square().mean() + (output * back).sum());
  });
}

TEST_P(HostTensors, OfAParameter) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor loss = run.forward(run.data).square().mean(), weight = run.net.parameters()[0];
    const at::Tensor there = weight.detach().cpu();
    there.mul_(2);
    note(run, there);
    note(run, weight);
    return trained(run, loss * there.to(gpu()).sum());
  });
}

TEST_P(HostTensors, ThatNobodyReads) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), zeros = at::zeros({4}), ones = zeros.to(gpu());
    ones.add_(1);
    run.trace.push_back(zeros.is_cpu() && !ones.is_cpu());
    return trained(run, (output * ones).square().mean() + zeros.sum().to(gpu()));
  });
}

TEST_P(HostTensors, AndTheirCpuAreOne) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), zeros = at::zeros({4}), same = zeros.cpu();
    zeros.add_(1);
    run.trace.push_back(same.data_ptr<float>()[1]);
    note(run, same);
    return trained(run, (output * zeros.to(gpu())).square().mean());
  });
}

TEST_P(HostTensors, WhereAnotherTensorIs) {
  static const at::Tensor other = at::ones({1}, at::kDouble);
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), x = output.detach() * 1, there = x.to(other),
                     as_other = x.type_as(other);
    there.mul_(2);
    note(run, there);
    note(run, as_other);
    note(run, x);
    return trained(run, (output * x).square().mean());
  });
}

TEST_P(HostTensors, GoByTypeAsOfTheSameType) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), x = output.detach() * 1, mask = at::ones({4}), there = x.type_as(mask);
    const at::Tensor here = mask.type_as(x);
    here.mul_(3);
    note(run, mask);
    note(run, there);
    note(run, here);
    return trained(run, (output * here * x).square().mean() + (output * there.to(gpu())).sum());
  });
}

TEST_P(HostTensors, ThatAnOpaqueFunctionTakesFirst) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    const auto doubled = [](at::Tensor here, at::Tensor there) { return (here * 2).to(there.device()); };
    const at::Tensor twice = opaque(doubled, output.cpu(), output);
    return trained(run, ((twice.cpu() * 0.5).sin().to(twice.device()) + output).square().mean());
  });
}

TEST(HostTensorsInLists, AreRefusedBesideOthers) {
  tests::run_smp_ranks(1, {.microbatches = 1}, [] {
    DistributedModel model(tests::make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data);
      return at::_foreach_mul({output, at::ones({4})}, 2.0)[0];
    });
    const std::string text = support::message_of<std::exception>([&] { step(tests::rows(2, 8, 1)); });
    EXPECT_TRUE(support::contains(text, "aten::_foreach_mul: expected lists of tensors on one device, got one that holds"))
        << text;
  });
}

TEST_P(HostTensors, AreNotTheDataOfAParameterOfTheFirstStep) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), data = run.net.first->weight.data();
    const auto product = [](at::Tensor x, at::Tensor other) {
      TORCH_CHECK(x.device() == other.device(), "tensors of two devices");
      return x * other.sum();
    };
    return trained(run, opaque(product, output, data).square().mean());
  });
}

// Of what is written into them, or of what they are shaped like, they do not take the device.
TEST_P(HostTensors, StayWhereTheyAre) {
  static const at::Tensor constant = at::ones({2, 4});
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), x = output.detach() * 1, zeros = at::zeros({2, 4});
    at::Tensor loss = output.square().mean();
    for (const at::Tensor& there :
         {at::copy(zeros, x), at::fill(zeros, x.sum()), zeros.masked_fill(zeros < 1, x.max()),
          at::slice_scatter(zeros, x.narrow(0, 0, 1), 0, 0, 1), zeros.t().reshape_as(x), constant.view_as(x) * 1}) {
      const at::Tensor back = there.to(gpu());
      back.mul_(2);
      note(run, there);
      note(run, back);
      loss = loss + (output * back).sum();
    }
    run.trace.push_back(constant.expand_as(x).is_cpu() && constant.narrow(0, 0, 1).is_cpu());
    return trained(run, loss);
  });
}

TEST_P(HostTensors, OfAParameterUnderAutocast) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor weight = run.net.parameters()[0];
    at::autocast::set_autocast_enabled(at::kCUDA, true);
    const at::Tensor doubles = weight.to(at::kCPU, at::kDouble).detach();
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCUDA, false);
    const at::Tensor output = run.forward(run.data), same = weight.detach();
    const at::Tensor there = same.to(at::kCPU, at::kFloat, /*non_blocking=*/false, /*copy=*/false);
    there.mul_(2);
    run.trace.push_back(same.is_cpu());
    return trained(run, output.square().mean() * there.sum().to(gpu()) + (output * same.sum()).sum());
  });
}

// Which refuses binary_cross_entropy of tensors of the device.
TEST_P(HostTensors, AreLeftAloneByItsAutocast) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), share = output.sigmoid().cpu();
    const auto on_host = [&] {
      const support::Autocast autocast(at::kCUDA);
      const at::Tensor product = share.mm(share.t());
      run.trace.push_back(product.scalar_type() == at::kFloat);
      return at::binary_cross_entropy(share, at::full_like(share, 0.5)) + product.mean();
    };
    return trained(run, on_host().to(gpu()));
  });
}

TEST_P(HostTensors, ConstantsAreNotThoseOfTheGpu) {
  static const at::Tensor there = at::ones({2, 4});
  check([](const BodyRun<SmallNet>& run) {
    thread_local const at::Tensor here = there.to(gpu());  // by the plain loop, which comes first
    const bool is_second = !run.trace.empty() && run.trace.back() == 1;
    const at::Tensor output = run.forward(run.data), sum = (is_second ? here : there) + 1, moved = sum.to(gpu());
    moved.mul_(2);
    run.trace.push_back(is_second ? 0 : 1);
    return trained(run, (output * sum.to(gpu())).square().mean());
  });
}

TEST_P(HostTensors, AreGivenToOpaqueFunctions) {
  check([](const BodyRun<SmallNet>& run) {
    const auto scaled = [](const at::Tensor& x, const at::Tensor& there) {
      TORCH_CHECK(!x.is_cpu() && there.is_cpu(), "expected tensors where the body has them");
      return x * there.accessor<double, 1>()[0];
    };
    const at::Tensor output = run.forward(run.data), there = output.detach().to(at::kCPU, at::kDouble).sum(0);
    return trained(run, smp::opaque(scaled, output, there).square().mean());
  });
}

TEST(OpaqueOnGpu, RefusesResultsOnTheHost) {
  tests::run_smp_ranks(1, {.log_level = LogLevel::kOff}, [] {
    DistributedModel model(tests::make_filled<SmallNet>());
    auto step =
        smp::step([&](at::Tensor data) { return smp::opaque([](const at::Tensor& x) { return x.cpu(); }, model(data)); });
    const at::NoGradGuard no_grad;
    const std::string text = support::message_of<std::exception>([&] { step(tests::rows(4, 8, 1)); });
    EXPECT_TRUE(
        support::contains(text, "opaque: expected a function whose results are on the rank's device, got one on cpu"))
        << text;
  });
}

TEST_P(HostTensors, CopiedInPlace) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), x = output.detach() * 1, there = x.cpu(), fresh = at::zeros({2, 4});
    fresh.copy_(x);
    note(run, fresh);
    there.mul_(2);
    x.copy_(there);
    note(run, x);
    there.copy_(output.detach() * 5);
    run.trace.push_back(there.data_ptr<float>()[3]);
    return trained(run, (output * x).square().mean());
  });
}

TEST_P(HostTensors, TakeGradientsBack) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data), there = output.cpu();
    const at::Tensor mask = (there.detach() > 0).to(at::kFloat);
    note(run, mask);
    return trained(run, output.square().mean() + (there * mask).mean().to(gpu()));
  });
}

TEST_P(HostTensors, AreTheLoss) {
  check([](const BodyRun<SmallNet>& run) { return trained(run, run.forward(run.data).square().mean().cpu()); });
}

TEST_P(HostTensors, ArePrinted) {
  check([](const BodyRun<SmallNet>& run) {
    const at::Tensor output = run.forward(run.data);
    std::ostringstream text;
    text << output << output.detach().to(at::kDouble);
    run.trace.push_back(static_cast<double>(std::hash<std::string>()(text.str())));
    return trained(run, output.square().mean());
  });
}

TEST_P(HostTensors, AreReturnedOnTheGpuOfEachRank) {
  tests::run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = tests::make_filled<SmallNet>();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor output = model(data), loss = output.square().mean();
      model.backward(loss);
      return std::vector<at::Tensor>{loss.detach().cpu(), output.detach().to(at::kCPU, at::kDouble), at::zeros({3})};
    });
    for (int s = 0; s < support::kStepsToTape; ++s) {
      for (const StepOutput& output : step(tests::rows(4, 8, 1))) {
        for (const at::Tensor& tensor : output.outputs()) EXPECT_EQ(tensor.device(), gpu());
      }
    }
  });
}

/// What its second layer needs is smallest where it is on the host.
struct MaskNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor mask = (first(x) > 0).to(at::kCPU).all(1, /*keepdim=*/true);
    return second(mask.to(x.device(), at::kFloat).expand({-1, 8}) + 1);
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
};

TEST(HostTensorsBetweenStages, KeepTheReceiverOffGraphs) {
  const Config by_hand{.microbatches = 2, .auto_partition = false, .default_partition = 0};
  tests::run_smp_ranks(2, by_hand, [] {
    const auto net = tests::make_filled<MaskNet>(), twin = tests::make_filled<MaskNet>();
    set_partition(*net->second, 1);
    twin->to(gpu());
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      return loss;
    });
    for (int s = 0; s < support::kStepsToTape; ++s) {
      const at::Tensor data = tests::rows(4, 8, 1).to(gpu());
      for (auto& parameter : net->parameters()) parameter.mutable_grad().reset();
      twin->zero_grad();
      std::vector<at::Tensor> want;
      for (const auto& part : support::split_batch({data}, 2)) {
        want.push_back(twin->forward(part[0]).square().mean());
        want.back().div(2).backward();
      }
      support::expect_bit_equal(step(data).outputs(), want, "step " + std::to_string(s));
    }
    tests::expect_twins(model, *twin, "gradients");
    if (pp_rank() == 0) return;
    const auto reports = support::stage_reports();
    EXPECT_GT(reports.at(0).num_taped, 0);
    EXPECT_EQ(reports.at(0).stays_off_graphs, "a tensor of the host that comes in");
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, HostTensors, testing::Values(1, 2, 3));

}  // namespace
}  // namespace smp
