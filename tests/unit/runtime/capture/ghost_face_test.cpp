// What a body sees of its ghosts: the tensors of its rank, in every run, as far as they can be told without data.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>
#include <torch/types.h>

#include <functional>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "runtime/capture/body_capture.h"
#include "runtime/capture/ghosts.h"
#include "tests/support/messages.h"

namespace smp::runtime {
namespace {

using partitioner::ValueKind;
using support::message_of;
using Tensors = std::vector<at::Tensor>;
using Body = std::function<Tensors(const Tensors& arguments)>;

Bindings bindings_of(const torch::nn::Module& module) {
  std::vector<NamedTensor> named;
  for (const auto& item : module.named_parameters()) named.push_back({ValueKind::kParameter, item.key(), item.value()});
  for (const auto& item : module.named_buffers()) named.push_back({ValueKind::kBuffer, item.key(), item.value()});
  return Bindings(std::move(named));
}

CapturedBody run(BodyCapture& capture, const Tensors& inputs, const Body& body) {
  try {
    const Tensors ghosts = capture.begin(inputs, "");
    Tensors returned;
    {
      const InterceptScope scope(capture);
      returned = body(ghosts);
    }
    return capture.finish(returned);
  } catch (...) {
    capture.abandon();
    throw;
  }
}

/// The body once recorded and twice matched.
void run_three_times(const Body& body) {
  const Bindings bindings;
  BodyCapture capture(bindings);
  for (int i = 0; i < 3; ++i) run(capture, {torch::ones({4, 8})}, body);
  EXPECT_EQ(capture.num_recordings(), 1);
}

TEST(GhostFace, IsThatOfTheTensorsOfItsRank) {
  const at::Tensor real = torch::ones({4, 8});
  run_three_times([&](const Tensors& arguments) {
    for (const at::Tensor& ghost : {arguments[0], arguments[0] * 2, arguments[0].data(), torch::zeros({4, 8})}) {
      EXPECT_EQ(ghost.device(), real.device());
      EXPECT_TRUE(ghost.is_cpu());
      EXPECT_FALSE(ghost.is_meta());
      EXPECT_EQ(ghost.key_set(), real.key_set());
      EXPECT_EQ(ghost.toString(), real.toString());
      EXPECT_EQ(ghost.options().backend(), real.options().backend());
      EXPECT_EQ(ghost.nbytes(), real.nbytes());
    }
    return Tensors{arguments[0] + 1};
  });
}

TEST(GhostFace, OpensAutocastForItsDevice) {
  run_three_times([](const Tensors& arguments) {
    at::autocast::set_autocast_enabled(arguments[0].device().type(), true);
    const at::Tensor product = arguments[0].mm(arguments[0].t());
    at::autocast::set_autocast_enabled(arguments[0].device().type(), false);
    EXPECT_EQ(product.scalar_type(), at::kBFloat16);
    return Tensors{product};
  });
}

TEST(GhostFace, IsNotLookedBehindByACopyToItsOwnDevice) {
  const at::Tensor weight = torch::ones({8});
  run_three_times([&](const Tensors& arguments) {
    const at::Tensor there = arguments[0].to(weight.device());
    EXPECT_TRUE(there.is_same(arguments[0]));
    return Tensors{there.to(weight.device(), at::kBFloat16).to(weight.options().dtype(at::kHalf)) * 2};
  });
}

TEST(GhostFace, IsLookedBehindByCpuItemAndPrinting) {
  const std::vector<std::function<void(const at::Tensor&)>> looks = {
      [](const at::Tensor& x) { EXPECT_EQ(x.cpu().data_ptr<float>()[0], 5); },
      [](const at::Tensor& x) { EXPECT_EQ(x.sum().item<float>(), 5 * 32); },
      [](const at::Tensor& x) {
        std::ostringstream text;
        text << x;
        EXPECT_NE(text.str().find("5"), std::string::npos) << text.str();
      }};
  for (const auto& look : looks) {
    const Bindings bindings;
    BodyCapture capture(bindings);
    int num_reads = 0;
    capture.set_reader([&](const ValueRead& wanted) {
      ++num_reads;
      Tensors values;
      for (partitioner::ValueId id : wanted.values) {
        const partitioner::TensorSpec& spec = wanted.graph.values[id].spec;
        values.push_back(torch::full(spec.sizes, spec.sizes.empty() ? 5 * 32 : 5, spec.dtype));
      }
      return values;
    });
    for (int i = 0; i < 3; ++i) {
      run(capture, {torch::ones({4, 8})}, [&](const Tensors& arguments) {
        const at::Tensor output = arguments[0] * 5;
        look(output);
        return Tensors{output};
      });
      EXPECT_EQ(num_reads, i + 1);
    }
  }
}

// Models branch on is_conj(), and resolve_conj() is a copy or none by it.
TEST(GhostFace, HasTheLazySignsOfItsTensorInMatchedRunsAndWhereOneEnds) {
  const Bindings bindings;
  BodyCapture capture(bindings);
  for (const bool ends_otherwise : {false, false, true, true}) {
    run(capture, {torch::ones({4, 8})}, [&](const Tensors& arguments) {
      const at::Tensor number = torch::view_as_complex(arguments[0].view({4, 4, 2})), turned = number.conj();
      if (ends_otherwise) torch::relu(arguments[0]);
      EXPECT_FALSE(number.is_conj());
      EXPECT_TRUE(turned.is_conj());
      EXPECT_TRUE(torch::imag(turned).is_neg());
      EXPECT_FALSE(turned.resolve_conj().is_conj());
      return Tensors{torch::imag(turned) * 2};
    });
  }
  EXPECT_EQ(capture.num_recordings(), 2);
}

TEST(GhostFace, HasTheSizesThatAnOperatorGivesItsOut) {
  run_three_times([](const Tensors& arguments) {
    at::Tensor product = torch::empty({0}), values = torch::empty({0}), indices = torch::empty({0}, torch::kLong);
    torch::mul_out(product, arguments[0], arguments[0]);
    torch::topk_out(values, indices, product, 3);
    EXPECT_EQ(product.sizes(), (at::IntArrayRef{4, 8}));
    EXPECT_EQ(values.sizes(), (at::IntArrayRef{4, 3}));
    EXPECT_EQ(indices.sizes(), (at::IntArrayRef{4, 3}));
    return Tensors{values * product.size(0)};
  });
}

// Each of them is an ordinary tensor on the memory that the ghosts of all runs share.
TEST(GhostRun, HasNoViewsMadeOutsideOfTheBodyOrOnAnotherThread) {
  const Bindings bindings;
  BodyCapture capture(bindings);
  at::Tensor kept;
  for (int i = 0; i < 3; ++i) {
    run(capture, {torch::ones({4, 8})}, [&](const Tensors& arguments) {
      kept = arguments[0] * 2;
      std::string message;
      std::thread([&] { message = message_of([&] { kept.view({32}); }); }).join();
      EXPECT_NE(message.find("another thread's body"), std::string::npos) << message;
      return Tensors{kept};
    });
    const at::Tensor copy = kept.detach();  // made without the storage's leave, so it is a ghost of the same run
    ASSERT_NE(as_ghost(copy), nullptr);
    EXPECT_EQ(as_ghost(copy)->run, as_ghost(kept)->run);
    for (const auto& look :
         {+[](const at::Tensor& x) { return x.view({32}); }, +[](const at::Tensor& x) { return x[0]; },
          +[](const at::Tensor& x) { return x.detach().view({32}); }, +[](const at::Tensor& x) { return x + 1; }}) {
      const std::string message = message_of([&] { look(kept); });
      EXPECT_NE(message.find("ghost"), std::string::npos) << message;
    }
  }
}

TEST(GhostRun, IsKnownToItsGhostsAndTheirCopies) {
  for (const bool copies : {false, true}) {
    at::Tensor kept;
    const Bindings bindings;
    BodyCapture capture(bindings);
    const Body body = [&](const Tensors& arguments) {
      const at::Tensor sum = (kept.defined() ? kept : arguments[0]) + 1;
      kept = copies ? arguments[0].data() : arguments[0];
      return Tensors{sum};
    };
    run(capture, {torch::ones({4, 8})}, body);
    for (int i = 0; i < 2; ++i) {
      const std::string message = message_of([&] { run(capture, {torch::ones({4, 8})}, body); });
      EXPECT_NE(message.find("ghost of an earlier run"), std::string::npos) << message;
    }
  }
}

// A plain loop's base requires a gradient from then on, and so does every other view of it.
TEST(GhostGradient, ReachesAllNamesOfTheMemoryThatIsWritten) {
  torch::nn::Linear layer(8, 8);
  const Bindings bindings = bindings_of(*layer);
  BodyCapture capture(bindings);
  for (int i = 0; i < 3; ++i) {
    run(capture, {torch::ones({4, 8})}, [&](const Tensors& arguments) {
      const at::Tensor base = torch::zeros({4, 8}), before = base[1], row = base[0];
      EXPECT_FALSE(base.requires_grad());
      row.copy_(layer(arguments[0])[0]);
      for (const at::Tensor& name : {base, before, row}) EXPECT_TRUE(name.requires_grad());
      return Tensors{base.sum()};
    });
  }
  EXPECT_EQ(capture.num_recordings(), 1);
}

}  // namespace
}  // namespace smp::runtime
