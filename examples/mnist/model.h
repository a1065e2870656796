// The convolutional network of the example: an ordinary torch::nn::Module that knows nothing of smp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace mnist {

struct ConvNetOptions {
  int64_t rows = 28, columns = 28;           // of an image; at least 6
  int64_t channels_1 = 32, channels_2 = 64;  // of the convolutions
  int64_t hidden = 128;                      // width of the layer before the last
};

/// Two convolutions of 3x3, pooling, two linear layers, two dropouts: the network of PyTorch's
/// MNIST example, for images of any size.
///
///   ConvNet net({.rows = 8, .columns = 8});
///   auto scores = net.forward(images);   // [batch, 1, 8, 8] -> [batch, 10]
class ConvNet : public torch::nn::Module {
 public:
  /// Throws c10::ValueError for sizes that do not work.
  explicit ConvNet(const ConvNetOptions& options);

  /// images: [batch, 1, rows, columns], float32. Returns the logarithms of the probabilities of the ten digits, [batch, 10].
  at::Tensor forward(at::Tensor images);

 private:
  torch::nn::Conv2d conv1_{nullptr}, conv2_{nullptr};
  torch::nn::Dropout dropout1_{nullptr}, dropout2_{nullptr};
  torch::nn::Linear fc1_{nullptr}, fc2_{nullptr};
};

}  // namespace mnist
