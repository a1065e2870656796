// A step body compared with the same code in a loop without smp, on the device that the program has chosen: losses,
// gradients, buffers and what the body has read.
// For files that are compiled with <torch/torch.h>.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "runtime/device/device.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp::tests {

using Forward = std::function<at::Tensor(const at::Tensor&)>;
using Backward = std::function<void(const at::Tensor&)>;

/// What one microbatch does, to a model of ours and to a plain module.
template <class Net>
struct BodyRun {
  Net& net;
  Forward forward;
  Backward backward;
  at::Tensor data;  // [2, 8]
  int step = 0;
  std::vector<double>& trace;  // what the body reads
};

template <class Net>
using LoopBody = std::function<at::Tensor(const BodyRun<Net>&)>;

template <class Net>
std::shared_ptr<Net> make_filled() {
  auto net = std::make_shared<Net>();
  fill(*net);
  return net;
}

struct Loop {
  int ranks = 1;
  int steps = 4;
  int microbatches = 3;
  StageKind stage = StageKind::kTape;
  std::function<void()> look = [] {};  // behind the last step, while the model lives
};

/// Gradients add up over the steps. Trains one model on all ranks of one pipeline.
template <class Net>
void expect_as_in_a_loop(const Loop& loop, const LoopBody<Net>& body) {
  const runtime::Device& device = runtime::this_ranks_device();
  const Config config{.microbatches = loop.microbatches, .stage = loop.stage, .log_level = LogLevel::kOff};
  run_smp_ranks(loop.ranks, config, [&] {
    const auto net = make_filled<Net>(), twin = make_filled<Net>();
    twin->to(device.current());
    DistributedModel model(net);
    std::vector<double> trace, want_trace;
    int s = 0;
    auto step = smp::step([&](at::Tensor data) {
      return body({*net, [&](const at::Tensor& x) { return model(x); },
                   [&](const at::Tensor& loss) { model.backward(loss); }, data, s, trace});
    });
    for (; s < loop.steps; ++s) {
      const at::Tensor data = rows(2 * loop.microbatches, 8, 10 + s).to(device.current());
      std::vector<at::Tensor> want;
      for (const auto& part : support::split_batch({data}, loop.microbatches)) {
        want.push_back(
            body({*twin, [&](const at::Tensor& x) { return twin->forward(x); },
                  [&](const at::Tensor& loss) { loss.div(loop.microbatches).backward(); }, part[0], s, want_trace})
                .detach());
      }
      const std::string what = "step " + std::to_string(s);
      support::expect_bit_equal(step(data).outputs(), want, what);
      expect_twins(model, *twin, what);
      const auto buffers = twin->named_buffers();
      for (const auto& entry : model.state_dict().entries) {
        if (entry.is_buffer) support::expect_bit_equal(entry.tensor, buffers[entry.name].cpu(), what + ": " + entry.name);
      }
      if (pp_rank() == 0) {
        EXPECT_EQ(trace, want_trace) << what;
      }
    }
    loop.look();
  });
}

}  // namespace smp::tests
