// Bodies that read values while they run, against the same loop without smp: the same bits, in the same order.
#include <gtest/gtest.h>

#include <functional>
#include <sstream>
#include <stdexcept>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::expect_bit_equal;
using tests::expect_twins;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Forward = std::function<at::Tensor(const at::Tensor&)>;
using Backward = std::function<void(const at::Tensor&)>;
/// What the body of one microbatch does, to models of ours and to plain modules; `trace` collects what it reads.
using ReadBody = std::function<at::Tensor(const Forward&, const Backward&, const at::Tensor&, std::vector<double>& trace)>;

struct NormNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(norm(first(x)))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
};

std::shared_ptr<NormNet> make_norm_net() {
  auto net = std::make_shared<NormNet>();
  tests::fill(*net);
  return net;
}

struct Layout {
  int ranks = 1;
  int pipeline = 0;
};

/// Four steps of three microbatches.
template <class Net>
void expect_as_in_a_loop(const Layout& layout, const std::function<std::shared_ptr<Net>()>& make, const ReadBody& body) {
  const Config config{.pipeline_parallel_degree = layout.pipeline, .microbatches = 3};
  run_smp_ranks(layout.ranks, config, [&] {
    const auto net = make(), twin = make();
    DistributedModel model(net);
    std::vector<double> trace, want_trace;
    auto step = smp::step([&](at::Tensor data) {
      return body([&](const at::Tensor& x) { return model(x); }, [&](const at::Tensor& loss) { model.backward(loss); }, data,
                  trace);
    });
    for (int s = 0; s < 4; ++s) {
      const at::Tensor data = rows(6, 8, 10 + s);
      std::vector<at::Tensor> want;
      for (const auto& part : support::split_batch({data}, 3)) {
        want.push_back(body([&](const at::Tensor& x) { return twin->forward(x); },
                            [](const at::Tensor& loss) { loss.div(3).backward(); }, part[0], want_trace)
                           .detach());
      }
      const std::string what = "step " + std::to_string(s);
      expect_bit_equal(step(data).outputs(), want, what);
      expect_twins(model, *twin, what);
      const auto buffers = twin->named_buffers();
      for (const auto& entry : model.state_dict().entries) {
        if (entry.is_buffer) expect_bit_equal(entry.tensor, buffers[entry.name], what + ": " + entry.name);
      }
      if (pp_rank() == 0) {
        EXPECT_EQ(trace, want_trace) << what;
      }
    }
  });
}

class ValueReads : public testing::TestWithParam<int> {
 protected:
  void check(const ReadBody& body) {
    expect_as_in_a_loop<SmallNet>({.ranks = GetParam()}, [] { return make_net(); }, body);
    expect_as_in_a_loop<NormNet>({.ranks = GetParam()}, make_norm_net, body);
  }
};

TEST_P(ValueReads, OfTheLossBeforeItsBackward) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor loss = forward(data).square().mean();
    trace.push_back(loss.item<double>());
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, OfTheLossAfterItsBackward) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor loss = forward(data).square().mean();
    backward(loss);
    trace.push_back(loss.item<double>());
    return loss;
  });
}

TEST_P(ValueReads, SeveralInOneBody) {
  check([](const Forward& forward, const Backward&, const at::Tensor& data, std::vector<double>& trace) {
    const at::NoGradGuard no_grad;
    const at::Tensor output = forward(data);
    trace.push_back(output.sum().item<double>());
    const at::Tensor correct = output.argmax(1).eq(0).sum();
    trace.push_back(static_cast<double>(correct.item<int64_t>()));
    return output;
  });
}

TEST_P(ValueReads, SeeWhatEarlierBodiesLeftInVariables) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const double before = trace.empty() ? 0.0 : trace.back();
    const at::Tensor loss = (forward(data) * (1 + before)).square().mean();
    backward(loss);
    trace.push_back(loss.item<double>() / 100);
    return loss;
  });
}

TEST_P(ValueReads, ChooseTheNextOperators) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    at::Tensor output = forward(data);
    trace.push_back(output.sum().item<double>());
    output = trace.back() > 0 ? output.square() : output.exp();
    const at::Tensor loss = output.mean();
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, ScaleWhatFollows) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor output = forward(data);
    const auto scale = output.abs().max().item<float>();
    trace.push_back(scale);
    const at::Tensor loss = (output / scale).square().mean();
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, OfTheInputsNeedNoPipeline) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    at::Tensor input = data.clone();
    if ((input.mul_(2).sum() > 0).item<bool>()) input = -input;
    trace.push_back(input[0][0].item<double>());
    const at::Tensor loss = (input.sum() > 1).item<bool>() ? forward(input).mean() : forward(input).square().mean();
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, SkipABackward) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor loss = forward(data).square().mean();
    trace.push_back(loss.item<double>());
    if (trace.size() % 3 != 2) backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, OfAPrintedTensor) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor loss = forward(data).square().mean();
    std::ostringstream text;
    text << loss;
    trace.push_back(std::stod(text.str()));
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, ThroughAPointerAfterCpu) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor output = forward(data);
    const at::Tensor best = output.argmax(1).cpu();
    const auto rows_of_best = best.accessor<int64_t, 1>();
    for (int64_t i = 0; i < best.size(0); ++i) trace.push_back(static_cast<double>(rows_of_best[i]));
    const at::Tensor twice = best.add(1).mul_(2);
    trace.push_back(static_cast<double>(twice.data_ptr<int64_t>()[0]));
    trace.push_back(twice.sum().item<double>());
    const at::Tensor loss = torch::nll_loss(torch::log_softmax(output, 1), best);
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, OfTensorsThatAreUsedFurtherKeepTheirGradient) {
  check([](const Forward& forward, const Backward& backward, const at::Tensor& data, std::vector<double>& trace) {
    const at::Tensor output = forward(data.to(at::kCPU).to(data.device())).cpu();
    trace.push_back(output[0][0].item<double>());
    trace.push_back(output.abs().contiguous().data_ptr<float>()[1]);
    const at::Tensor loss = output.square().mean();
    backward(loss);
    return loss;
  });
}

TEST_P(ValueReads, OfAnExceptionLeaveNothingBehind) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = make_norm_net(), twin = make_norm_net();
    DistributedModel model(net);
    bool throws = false;
    int microbatch = 0;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      const auto value = loss.item<float>();
      if (throws && microbatch++ == 1) throw std::runtime_error("too large: " + std::to_string(value > 0));
      return loss;
    });
    const auto plain_step = [&](const at::Tensor& data) {
      for (const auto& part : support::split_batch({data}, 2)) twin->forward(part[0]).square().mean().div(2).backward();
    };
    step(rows(4, 8, 1));
    plain_step(rows(4, 8, 1));
    throws = true;
    const std::string text = support::message_of<std::exception>([&] { step(rows(4, 8, 2)); });
    EXPECT_TRUE(support::contains(text, "too large: 1")) << text;
    expect_twins(model, *twin, "after the exception");
    for (const auto& entry : model.state_dict().entries) {
      if (entry.is_buffer) expect_bit_equal(entry.tensor, twin->named_buffers()[entry.name], entry.name);
    }
    throws = false;
    step(rows(4, 8, 3));
    plain_step(rows(4, 8, 3));
    expect_twins(model, *twin, "after another step");
  });
}

TEST_P(ValueReads, OfAModelThatIsPlacedAlready) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto net = make_norm_net(), twin = make_norm_net();
    DistributedModel model(net);
    auto train = tests::training_step(model);
    std::vector<double> read;
    int microbatch = 0;
    auto look = smp::step([&](at::Tensor data) {
      // Another structure in each microbatch, so that the second is recorded when the first has run.
      const at::Tensor output = microbatch++ % 2 == 0 ? model(data) : model(data).exp();
      read.push_back(output.sum().item<double>());
      read.push_back(output.max().item<double>());
      return output;
    });
    const at::Tensor data = rows(4, 8, 1), target = rows(4, 4, 2);
    train(data, target);
    tests::eager_step(*twin, data, target, 2);
    for (int s = 0; s < 3; ++s) {
      std::vector<double> want;
      for (const auto& part : support::split_batch({data}, 2)) {
        const at::Tensor output = want.empty() ? twin->forward(part[0]) : twin->forward(part[0]).exp();
        want.push_back(output.sum().item<double>());
        want.push_back(output.max().item<double>());
      }
      read.clear();
      look(data);
      if (pp_rank() == 0) {
        EXPECT_EQ(read, want);
      }
      for (const auto& entry : model.state_dict().entries) {
        if (entry.is_buffer) expect_bit_equal(entry.tensor, twin->named_buffers()[entry.name], entry.name);
      }
    }
  });
}

TEST_P(ValueReads, OfASingleMicrobatchThatTakesAnotherPath) {
  run_smp_ranks(GetParam(), {.microbatches = 1}, [] {
    const auto net = make_norm_net(), twin = make_norm_net();
    DistributedModel model(net);
    const auto loss_of = [](const at::Tensor& output, int step) {
      const bool is_large = output.abs().sum().item<float>() > 0 && step % 3 == 2;
      return is_large ? output.exp().mean() : output.square().mean();
    };
    int s = 0;
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = loss_of(model(data), s);
      model.backward(loss);
      return loss;
    });
    for (; s < 6; ++s) {
      const at::Tensor data = rows(4, 8, 10 + s), want = loss_of(twin->forward(data), s);
      want.backward();
      expect_bit_equal(step(data)[0], want.detach(), "step " + std::to_string(s));
      expect_twins(model, *twin, "step " + std::to_string(s));
      for (const auto& entry : model.state_dict().entries) {
        if (entry.is_buffer) expect_bit_equal(entry.tensor, twin->named_buffers()[entry.name], entry.name);
      }
    }
  });
}

TEST_P(ValueReads, DrawTheSameRandomNumbers) {
  run_smp_ranks(GetParam(), {.microbatches = 2}, [] {
    const auto losses = [](bool reads) {
      DistributedModel model(make_net(at::kFloat, 0.5));
      std::vector<double> read, returned;
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = model(data).square().mean();
        if (reads) read.push_back(loss.item<double>());
        model.backward(loss);
        return loss;
      });
      for (int s = 0; s < 3; ++s) {
        const StepOutput output = step(rows(4, 8, 1));
        for (const at::Tensor& loss : output.outputs()) returned.push_back(loss.item<double>());
      }
      if (reads && pp_rank() == 0) {
        EXPECT_EQ(read, returned);
      }
      return returned;
    };
    EXPECT_EQ(losses(true), losses(false));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, ValueReads, testing::Values(1, 2, 3));

TEST(ValueReadsOfReplicas, MayBeOneReplicasOnly) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    const auto train = [](bool reads) {
      DistributedModel model(make_net());
      auto step = smp::step([&](at::Tensor data) {
        const at::Tensor loss = model(data).square().mean();
        if (reads && dp_rank() == 0) {
          EXPECT_GT(loss.item<float>(), 0);
        }
        model.backward(loss);
        return loss;
      });
      for (int s = 0; s < 3; ++s) step(rows(4, 8, 10 + dp_rank()));
      std::vector<at::Tensor> gradients;
      for (const at::Tensor& parameter : model.local_parameters()) gradients.push_back(parameter.grad().clone());
      return gradients;
    };
    expect_bit_equal(train(true), train(false), "gradients");
  });
}

TEST(ValueReadsOfReplicas, MayStartAgainAfterAReplicaRefusedBeforeTheOtherReads) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    DistributedModel model(make_net());
    int call = 0;
    auto step = smp::step([&](at::Tensor data) {
      if (call < 2 && dp_rank() == 1) throw std::runtime_error("not yet");
      const at::Tensor loss = model(data).square().mean();
      if (dp_rank() == 0) {
        EXPECT_GT(loss.item<float>(), 0);
      }
      model.backward(loss);
      return loss;
    });
    for (; call < 2; ++call) {
      const std::string text = support::message_of<std::exception>([&] { step(rows(4, 8, 1)); });
      EXPECT_TRUE(support::contains(text, "not yet")) << text;
    }
    step(rows(4, 8, 1));
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_TRUE(parameter.grad().defined());
  });
}

TEST(ValueReadsOfReplicas, ThatThrowOnOneReplicaEndTheStepOnAll) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    DistributedModel model(make_net());
    auto step = smp::step([&](at::Tensor data) {
      const at::Tensor loss = model(data).square().mean();
      model.backward(loss);
      if (dp_rank() == 1 && loss.item<float>() > 0) throw std::runtime_error("enough");
      return loss;
    });
    const std::string text = support::message_of<std::exception>([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(support::contains(text, "enough")) << text;
    for (const at::Tensor& parameter : model.local_parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

}  // namespace
}  // namespace smp
