// The six models that smp is measured on against its peers, operator by operator what models.py builds for them.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace smp::benchmarks {

/// Maps the input of a microbatch to what the loss takes.
struct PeerNet : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x) = 0;
};

struct PeerModel {
  std::shared_ptr<PeerNet> net;
  at::Tensor x, y;  // the full batch
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& y)> loss;
};

/// lm-small, lm-medium, mlp-tiny, mlp-wide, gpt2 or resnet, always with the same numbers. Throws c10::ValueError for another
/// name.
PeerModel make_peer_model(const std::string& name);

std::vector<std::string> peer_model_names();

}  // namespace smp::benchmarks
