// Building and calling the network.
#include "examples/mnist/model.h"

#include <torch/torch.h>

namespace mnist {

namespace nn = torch::nn;

ConvNet::ConvNet(const ConvNetOptions& options) {
  constexpr int64_t kKernel = 3, kNumClasses = 10;
  constexpr double kDropout1 = 0.25, kDropout2 = 0.5;
  // Each convolution takes kKernel - 1 pixels off, then two by two become one.
  const auto pooled = [](int64_t size) { return (size - 2 * (kKernel - 1)) / 2; };
  const int64_t rows = pooled(options.rows), columns = pooled(options.columns);
  TORCH_CHECK_VALUE(rows > 0 && columns > 0, "mnist: expected images of at least 6 by 6 pixels, got ", options.rows, " by ",
                    options.columns, ".");
  TORCH_CHECK_VALUE(options.channels_1 > 0 && options.channels_2 > 0 && options.hidden > 0,
                    "mnist: expected channels and hidden above 0, got ", options.channels_1, ", ", options.channels_2,
                    " and ", options.hidden, ". Change ConvNetOptions.");
  conv1_ = register_module("conv1", nn::Conv2d(1, options.channels_1, kKernel));
  conv2_ = register_module("conv2", nn::Conv2d(options.channels_1, options.channels_2, kKernel));
  dropout1_ = register_module("dropout1", nn::Dropout(kDropout1));
  fc1_ = register_module("fc1", nn::Linear(options.channels_2 * rows * columns, options.hidden));
  dropout2_ = register_module("dropout2", nn::Dropout(kDropout2));
  fc2_ = register_module("fc2", nn::Linear(options.hidden, kNumClasses));
}

at::Tensor ConvNet::forward(at::Tensor images) {
  auto x = torch::relu(conv2_(torch::relu(conv1_(images))));
  x = dropout1_(torch::max_pool2d(x, 2)).flatten(1);
  x = dropout2_(torch::relu(fc1_(x)));
  return torch::log_softmax(fc2_(x), 1);
}

}  // namespace mnist
