// The two networks of the example: ordinary torch::nn::Modules that know nothing of smp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace gan {

/// Three linear layers: makes points of noise.
class Generator : public torch::nn::Module {
 public:
  /// Throws c10::ValueError unless both sizes are above 0.
  Generator(int64_t noise, int64_t hidden);

  /// noise: [batch, noise], float32 -> points [batch, 2].
  at::Tensor forward(const at::Tensor& noise);

 private:
  torch::nn::Linear first_{nullptr}, second_{nullptr}, last_{nullptr};
};

/// Three linear layers: tells points of the ring from those of the generator.
class Discriminator : public torch::nn::Module {
 public:
  /// Throws c10::ValueError unless `hidden` is above 0.
  explicit Discriminator(int64_t hidden);

  /// points: [batch, 2], float32 -> logits [batch, 1], above 0 for what is taken for real.
  at::Tensor forward(const at::Tensor& points);

 private:
  torch::nn::Linear first_{nullptr}, second_{nullptr}, last_{nullptr};
};

}  // namespace gan
