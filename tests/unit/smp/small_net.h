// Small modules, one of them with the knobs that training loops turn, their data, and the eager step to compare with.
// For files that are compiled with <torch/torch.h>.
#pragma once

#include <torch/torch.h>

#include <memory>
#include <vector>

#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/oracle.h"

namespace smp::tests {

inline at::Generator generator(uint64_t seed) { return at::make_generator<at::CPUGeneratorImpl>(seed); }

/// [rows, columns], normal, the same bits for the same seed; draws nothing from the default generator.
inline at::Tensor rows(int64_t number, int64_t columns, uint64_t seed, at::ScalarType dtype = at::kFloat) {
  return torch::empty({number, columns}, dtype).normal_(0, 1, generator(seed));
}

struct SmallNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = first(x) / temperature;
    hidden = squashes ? torch::tanh(second(hidden)) : torch::relu(second(hidden));
    return fourth(torch::relu(third(dropout(hidden))));
  }

  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 8));
  torch::nn::Linear fourth = register_module("fourth", torch::nn::Linear(8, 4));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.0));
  double temperature = 2.0;
  bool squashes = false;
};

struct TwoLayers : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(first(x))); }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear last = register_module("last", torch::nn::Linear(8, 4));
};

struct NormNet : TwoLayers {
  at::Tensor forward(const at::Tensor& x) { return last(torch::relu(norm(first(x)))); }
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(8));
};

/// With a parameter and a buffer for the body, which forward leaves alone.
struct CountNet : SmallNet {
  at::Tensor scale = register_parameter("scale", torch::ones({1}));
  at::Tensor count = register_buffer("count", torch::zeros({3}));
};

/// Writes the same numbers into every module of one type.
inline void fill(torch::nn::Module& module, uint64_t seed = 3) {
  const at::NoGradGuard no_grad;
  const at::Generator numbers = generator(seed);
  for (at::Tensor& parameter : module.parameters()) parameter.normal_(0, 0.5, numbers);
}

inline std::shared_ptr<SmallNet> make_net(at::ScalarType dtype = at::kFloat, double dropout = 0.0) {
  auto net = std::make_shared<SmallNet>();
  net->to(dtype);
  net->dropout->options.p(dropout);
  fill(*net);
  return net;
}

/// The step body of every test, on the module itself: one loss per microbatch, gradients added.
template <class Net>
std::vector<at::Tensor> eager_step(Net& net, const at::Tensor& data, const at::Tensor& target, int microbatches) {
  std::vector<at::Tensor> losses;
  for (const auto& part : support::split_batch({data, target}, microbatches)) {
    const at::Tensor loss = torch::mse_loss(net.forward(part[0]), part[1]);
    loss.div(microbatches).backward();
    losses.push_back(loss.detach());
  }
  return losses;
}

/// The same body as a step function.
template <class Net>
auto training_step(DistributedModel<Net>& model) {
  return smp::step([&model](at::Tensor data, at::Tensor target) {
    const at::Tensor loss = torch::mse_loss(model(data), target);
    model.backward(loss);
    return loss;
  });
}

/// What lives here has the gradients and values of `twin`, bit for bit.
inline void expect_twins(const DistributedModelBase& model, const torch::nn::Module& twin, const std::string& what) {
  const auto parameters = twin.named_parameters();
  for (const auto& [name, tensor] : model.local_named_parameters()) {
    support::expect_bit_equal(tensor, parameters[name], what + ": " + name);
    support::expect_bit_equal(tensor.grad(), parameters[name].grad(), what + ": gradient of " + name);
  }
}

}  // namespace smp::tests
