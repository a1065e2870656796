// A training run that tests save, stop and resume.
// For files that are compiled with <torch/torch.h>.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "tests/unit/smp/small_net.h"

namespace smp::tests {

struct ByAdam {
  static auto of(torch::nn::Module& net) { return torch::optim::Adam(net.parameters(), 0.01); }
};
struct BySgd {
  static auto of(torch::nn::Module& net) {
    return torch::optim::SGD(net.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
  }
};

/// On this rank, from scratch. Replicas take their parts of each batch.
template <class Net = SmallNet, class Kind = ByAdam>
struct SavedTraining {
  explicit SavedTraining(uint64_t seed = 3) {
    fill(*net, seed);
    if constexpr (requires { net->dropout; }) net->dropout->options.p(0.3);
  }
  std::shared_ptr<Net> net = std::make_shared<Net>();
  DistributedModel<Net> model{net};
  DistributedOptimizer<decltype(Kind::of(*net))> optimizer{Kind::of(*net), model};
  decltype(training_step(model)) step = training_step(model);

  /// The losses of these steps, which have numbers, whatever has run before.
  std::vector<at::Tensor> train(int first, int last, const std::function<void()>& after_each = [] {}) {
    std::vector<at::Tensor> losses;
    for (int s = first; s < last; ++s) {
      const int64_t mine = 8 / dp_size(), at = dp_rank() * mine;
      optimizer.zero_grad();
      const auto loss = step(rows(8, 8, 10 + s).narrow(0, at, mine), rows(8, 4, 50 + s).narrow(0, at, mine));
      losses.push_back(all_reduce_mean(loss.reduce_mean()));
      optimizer.step();
      after_each();
    }
    return losses;
  }
};

}  // namespace smp::tests
