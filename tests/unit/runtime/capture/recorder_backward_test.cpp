// A recorder alone, beyond the operators: losses that start backwards, and values that the body reads.
#include <gtest/gtest.h>
#include <torch/types.h>

#include <functional>

#include "runtime/capture/interceptor.h"
#include "runtime/capture/recorder.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using partitioner::Graph;
using partitioner::NodeId;
using partitioner::ValueId;
using partitioner::ValueKind;
using partitioner::ValueRef;
using support::contains;

class RecorderBackward : public ::testing::Test {
 protected:
  using Stepped = std::function<at::Tensor(Recorder& recorder, const at::Tensor& argument)>;

  std::shared_ptr<Recording> recorded(const Stepped& body) {
    Recorder recorder(bindings_, begin_ghost_run());
    const std::vector<at::Tensor> inputs = recorder.start({torch::ones({4, 8})});
    at::Tensor returned;
    {
      const InterceptScope scope(recorder);
      returned = body(recorder, inputs[0]);
    }
    return recorder.finish({recorder.value_of(returned, "the result")}, "key");
  }
  std::string refusal(const Stepped& body) {
    return support::message_of<c10::Error>([&] { recorded(body); });
  }
  static NodeId position(const Recorder& recorder) { return static_cast<NodeId>(recorder.recording().graph.nodes.size()); }
  /// As BodyCapture calls it: nothing is intercepted meanwhile.
  static void backward(Recorder& recorder, const at::Tensor& loss) {
    const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
    recorder.add_backward_root(loss, position(recorder));
  }
  /// As within an operator that the body has called, which is when bodies read.
  static ValueId read(Recorder& recorder, const at::Tensor& tensor) {
    const c10::impl::ExcludeDispatchKeyGuard off(kCaptureKey);
    return recorder.add_read(recorder.value_of(tensor, "what is read"), position(recorder));
  }
  static std::vector<std::string> operators_of(const Graph& graph) {
    std::vector<std::string> names;
    for (const auto& node : graph.nodes) names.push_back(node.op);
    return names;
  }

  at::Tensor weight_ = torch::ones({8, 8}).requires_grad_();
  at::Tensor scale_ = torch::ones({8}).requires_grad_();
  at::Tensor mean_ = torch::zeros({8}), variance_ = torch::ones({8});
  const Bindings bindings_{{{ValueKind::kParameter, "fc.weight", weight_},
                            {ValueKind::kParameter, "norm.scale", scale_},
                            {ValueKind::kBuffer, "norm.mean", mean_},
                            {ValueKind::kBuffer, "norm.variance", variance_}}};
};

TEST_F(RecorderBackward, RootsAreTheLossesInTheirOrder) {
  ValueId first = -1, second = -1;
  const auto recording = recorded([&](Recorder& recorder, const at::Tensor& x) {
    const at::Tensor y = x.mm(weight_), sum = y.sum(), mean = y.mean();
    backward(recorder, mean);
    backward(recorder, sum);
    first = recorder.value_of(mean, "the mean");
    second = recorder.value_of(sum, "the sum");
    return sum;
  });
  EXPECT_EQ(recording->graph.backward_roots, (std::vector<ValueId>{first, second}));
  EXPECT_NE(first, second);
}

TEST_F(RecorderBackward, OneLossStartsOneBackward) {
  const std::string text = refusal([&](Recorder& recorder, const at::Tensor& x) {
    const at::Tensor loss = x.mm(weight_).sum();
    backward(recorder, loss);
    backward(recorder, loss);
    return loss;
  });
  EXPECT_TRUE(contains(text, "expected another loss in each backward() of a body, got the same one twice")) << text;
}

TEST_F(RecorderBackward, ALossIsWhatAnOperatorMakes) {
  const std::string text = refusal([&](Recorder& recorder, const at::Tensor&) {
    backward(recorder, scale_);
    return scale_;
  });
  EXPECT_TRUE(contains(text, "expected a loss that operators make, got 'norm.scale' of the model itself")) << text;
}

TEST_F(RecorderBackward, WritesToWhatItNeedsAreRefused) {
  const std::string text = refusal([&](Recorder& recorder, const at::Tensor& x) {
    at::Tensor y = x.mm(weight_);
    const at::Tensor loss = y.mul(y).sum();
    backward(recorder, loss);
    y.detach().add_(1);
    return loss;
  });
  EXPECT_TRUE(contains(text,
                       "in or after module 'fc': expected operators after backward() to leave alone what the backward "
                       "needs, got aten::add_, which writes to a tensor of sizes [4, 8]"))
      << text;
}

TEST_F(RecorderBackward, WritesToWhatItDoesNotNeedAreRecorded) {
  const auto recording = recorded([&](Recorder& recorder, const at::Tensor& x) {
    at::Tensor sum = x.mm(weight_).add(1);
    const at::Tensor loss = sum.sum();
    backward(recorder, loss);
    sum.detach().add_(1);
    return loss;
  });
  EXPECT_EQ(operators_of(recording->graph).back(), "aten::add_") << "a sum saves nothing";
}

TEST_F(RecorderBackward, WritesToTheLossAreRefused) {
  const std::string text = refusal([&](Recorder& recorder, const at::Tensor& x) {
    at::Tensor loss = x.mm(weight_).sum();
    backward(recorder, loss);
    return loss.div_(4);
  });
  EXPECT_TRUE(contains(text, "expected operators after backward() to leave the loss as it is, got aten::div_")) << text;
}

TEST_F(RecorderBackward, WritesThatAutogradDoesNotNoticeAreRefusedBeforeIt) {
  const auto norm = [&](const at::Tensor& x, bool trains) {
    return torch::batch_norm(x, scale_, {}, mean_, variance_, trains, 0.1, 1e-5, false);
  };
  const std::string text = refusal([&](Recorder& recorder, const at::Tensor& x) {
    const at::Tensor evaluated = norm(x, false), loss = norm(evaluated, true).sum();
    backward(recorder, loss);
    return loss;
  });
  EXPECT_TRUE(contains(text, "expected 'norm.mean' to stay as aten::batch_norm has found it until the backward")) << text;
  EXPECT_EQ(refusal([&](Recorder& recorder, const at::Tensor& x) {
              const at::Tensor loss = norm(norm(x, true), false).sum();
              backward(recorder, loss);
              return loss;
            }),
            "")
      << "written before it is read";
}

TEST_F(RecorderBackward, AValueThatStaysIsReadAsItIs) {
  ValueId kept = -1, value = -1;
  const auto recording = recorded([&](Recorder& recorder, const at::Tensor& x) {
    const at::Tensor y = x.mm(weight_);
    value = recorder.value_of(y, "y");
    kept = read(recorder, y);
    EXPECT_EQ(read(recorder, y), kept);
    return y.mul(2);
  });
  EXPECT_EQ(kept, value);
  EXPECT_EQ(recording->graph.read, std::vector<ValueId>{value}) << "once, though it is read twice";
  EXPECT_EQ(operators_of(recording->graph), (std::vector<std::string>{"aten::mm", "aten::mul"}));
}

TEST_F(RecorderBackward, AValueWrittenAfterItWasReadIsKeptByACopy) {
  ValueId value = -1;
  const auto recording = recorded([&](Recorder& recorder, const at::Tensor& x) {
    at::Tensor y = x.mul(2);
    value = read(recorder, y);
    y.select(0, 0).add_(1);
    return y;
  });
  const Graph& graph = recording->graph;
  ASSERT_EQ(operators_of(graph), (std::vector<std::string>{"aten::mul", "aten::select", "aten::clone", "aten::add_"}));
  EXPECT_EQ(std::get<ValueRef>(graph.nodes[2].arguments[0]).id, value);
  EXPECT_TRUE(recording->calls[2].synthesised && !recording->calls[3].synthesised);
  EXPECT_EQ(graph.read, graph.nodes[2].outputs);
  EXPECT_EQ(kept_value(*recording, value, 1), graph.nodes[2].outputs[0]);
}

TEST_F(RecorderBackward, ABufferIsCopiedWhenItIsRead) {
  const auto recording = recorded([&](Recorder& recorder, const at::Tensor& x) {
    const at::Tensor y = x.add(mean_);
    read(recorder, mean_);
    return y;
  });
  EXPECT_EQ(operators_of(recording->graph), (std::vector<std::string>{"aten::add", "aten::clone"}))
      << "a later microbatch may write to it before the value is handed over";
}

TEST_F(RecorderBackward, AParameterThatNoOperatorUsesGetsOneThatDoes) {
  const auto read_of = [&](bool is_used) {
    return operators_of(recorded([&](Recorder& recorder, const at::Tensor& x) {
                          const at::Tensor y = is_used ? x.mul(scale_) : x.mul(2);
                          read(recorder, scale_);
                          return y;
                        })->graph);
  };
  EXPECT_EQ(read_of(true), std::vector<std::string>{"aten::mul"});
  EXPECT_EQ(read_of(false), (std::vector<std::string>{"aten::mul", "aten::clone"})) << "so that some rank holds it";
}

TEST_F(RecorderBackward, UndefinedResultsAreNamedByTheirRole) {
  EXPECT_EQ(refusal([](Recorder&, const at::Tensor&) { return at::Tensor(); }),
            "the result: expected a defined tensor, got an undefined one.");
}

}  // namespace
}  // namespace smp::runtime
