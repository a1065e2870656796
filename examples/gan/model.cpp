// Building and calling the networks.
#include "examples/gan/model.h"

#include <torch/torch.h>

namespace gan {
namespace {

using torch::nn::Linear;

constexpr int64_t kCoordinates = 2;

at::Tensor leaky(const at::Tensor& x) { return torch::leaky_relu(x, 0.2); }

void check(int64_t size, const char* name) {
  TORCH_CHECK_VALUE(size > 0, "gan: expected ", name, " above 0, got ", size, ".");
}

}  // namespace

Generator::Generator(int64_t noise, int64_t hidden) {
  check(noise, "noise");
  check(hidden, "hidden");
  first_ = register_module("first", Linear(noise, hidden));
  second_ = register_module("second", Linear(hidden, hidden));
  last_ = register_module("last", Linear(hidden, kCoordinates));
}

at::Tensor Generator::forward(const at::Tensor& noise) { return last_(torch::relu(second_(torch::relu(first_(noise))))); }

Discriminator::Discriminator(int64_t hidden) {
  check(hidden, "hidden");
  first_ = register_module("first", Linear(kCoordinates, hidden));
  second_ = register_module("second", Linear(hidden, hidden));
  last_ = register_module("last", Linear(hidden, 1));
}

at::Tensor Discriminator::forward(const at::Tensor& points) { return last_(leaky(second_(leaky(first_(points))))); }

}  // namespace gan
