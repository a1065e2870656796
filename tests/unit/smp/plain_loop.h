// A step body compared with the same code in a loop without smp, on the device that the program has chosen: losses,
// gradients, parameters, buffers and what the body has read.
// For files that are compiled with <torch/torch.h>.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "runtime/device/device.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp::tests {

using Forward = std::function<at::Tensor(const at::Tensor&)>;
using Backward = std::function<void(const at::Tensor&)>;
using Texts = std::vector<std::string>;

/// What the body of one microbatch works with, whatever the module.
struct MicrobatchRun {
  Forward forward;
  Backward backward;
  at::Tensor data;  // [2, 8] where the loop makes no batches of its own
  int step = 0;
  int microbatch = 0;          // of the step
  std::vector<double>& trace;  // what the body reads

  at::Tensor trained(const at::Tensor& loss) const {
    backward(loss);
    return loss;
  }
};

/// The body of most loops.
inline at::Tensor train_once(const MicrobatchRun& run) { return run.trained(run.forward(run.data).square().mean()); }

/// What one microbatch does, to a model of ours and to a plain module.
template <class Net>
struct BodyRun : MicrobatchRun {
  Net& net;
};

template <class Net>
using LoopBody = std::function<at::Tensor(const BodyRun<Net>&)>;

template <class Net>
std::shared_ptr<Net> make_filled() {
  auto net = std::make_shared<Net>();
  fill(*net);
  return net;
}

/// The training loop around the body, which does the same to a module of ours and to its plain twin.
template <class Net>
struct Loop {
  int ranks = 1;
  int steps = 4;
  Config config{.microbatches = 3};
  bool trains = true;      // else without gradients
  bool optimizes = false;  // by SGD with momentum; gradients are cleared, but before the second step
  std::function<std::shared_ptr<Net>()> make = make_filled<Net>;
  std::function<std::shared_ptr<Net>()> make_twin = nullptr;  // where it is another one
  std::function<at::Tensor(int step)> batch = nullptr;
  std::function<void(Net&, int step)> before_step = [](Net&, int) {};
  /// What the error of a step says that is refused on every rank; it leaves all as it was. Empty: the step goes.
  std::function<Texts(int step)> refusal = [](int) { return Texts(); };
  std::function<void(DistributedModel<Net>&)> look = [](DistributedModel<Net>&) {};  // behind the last step
};

/// Gradients add up over the steps. Trains one model on all ranks; replicas have the same data.
template <class Net>
void expect_as_in_a_loop(const Loop<Net>& loop, const LoopBody<Net>& body) {
  Config config = loop.config;
  config.log_level = LogLevel::kOff;
  const auto microbatches = static_cast<int>(config.microbatches);
  run_smp_ranks(loop.ranks, config, [&] {
    const at::Device device = runtime::this_ranks_device().current();
    const auto net = loop.make(), twin = loop.make_twin ? loop.make_twin() : loop.make();
    twin->to(device);
    DistributedModel<Net> model(net);
    const auto momentum = torch::optim::SGDOptions(0.1).momentum(0.9);
    std::optional<DistributedOptimizer<torch::optim::SGD>> optimizer;
    torch::optim::SGD twin_optimizer(twin->parameters(), momentum);
    if (loop.optimizes) optimizer.emplace(torch::optim::SGD(net->parameters(), momentum), model);
    const at::AutoGradMode mode(loop.trains);
    std::vector<double> trace, want_trace;
    int s = 0, m = 0;
    auto step = smp::step([&](at::Tensor data) {
      return body({{[&](const at::Tensor& x) { return model(x); }, [&](const at::Tensor& loss) { model.backward(loss); },
                    data, s, m++, trace},
                   *net});
    });
    for (; s < loop.steps; ++s) {
      const std::string what = "step " + std::to_string(s) + " on " + std::to_string(loop.ranks) + " ranks";
      const at::Tensor data = (loop.batch ? loop.batch(s) : rows(2 * microbatches, 8, 10 + s)).to(device);
      loop.before_step(*net, s), loop.before_step(*twin, s);
      if (optimizer && s != 1) optimizer->zero_grad(), twin_optimizer.zero_grad();
      m = 0;
      if (const Texts refusal = loop.refusal(s); !refusal.empty()) {
        const std::string text = support::message_of<std::exception>([&] { step(data); });
        for (const std::string& part : refusal) EXPECT_TRUE(support::contains(text, part)) << what << ": " << text;
      } else {
        std::vector<at::Tensor> want;
        const Forward forward = [&](const at::Tensor& x) { return twin->forward(x); };
        const Backward backward = [&](const at::Tensor& loss) {
          loss.div(microbatches).backward({}, /*retain_graph=*/true);
        };
        for (const auto& part : support::split_batch({data}, microbatches)) {
          const int number = static_cast<int>(want.size());
          want.push_back(body({{forward, backward, part[0], s, number, want_trace}, *twin}).detach());
        }
        support::expect_bit_equal(step(data).outputs(), want, what);
        if (optimizer) optimizer->step(), twin_optimizer.step();
      }
      expect_twins(model, *twin, what);
      const auto buffers = twin->named_buffers();
      for (const auto& entry : model.state_dict().entries) {
        if (entry.is_buffer) support::expect_bit_equal(entry.tensor, buffers[entry.name].cpu(), what + ": " + entry.name);
      }
      if (pp_rank() == 0) {
        EXPECT_EQ(trace, want_trace) << what;
      }
    }
    loop.look(model);
  });
}

/// A row of a table of bodies, each of which runs on several numbers of ranks.
template <class Net>
struct BodyCase {
  std::string name;
  LoopBody<Net> body;
  int steps = 4;

  friend void PrintTo(const BodyCase& row, std::ostream* out) { *out << row.name; }
};

template <class Net>
class BodyTable : public testing::TestWithParam<std::tuple<BodyCase<Net>, int>> {
 protected:
  static void expect_as_in_a_loop() {
    const auto& [row, ranks] = BodyTable::GetParam();
    tests::expect_as_in_a_loop<Net>({.ranks = ranks, .steps = row.steps}, row.body);
  }
};

/// Names the rows of a table that run on several numbers of ranks.
template <class Row>
std::string name_on_ranks(const testing::TestParamInfo<std::tuple<Row, int>>& test) {
  return std::get<0>(test.param).name + "_on_" + std::to_string(std::get<1>(test.param));
}

}  // namespace smp::tests
