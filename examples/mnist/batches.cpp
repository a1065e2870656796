// Picking rows and turning bytes into numbers.
#include "examples/mnist/batches.h"

#include <torch/torch.h>

#include <algorithm>

namespace mnist {
namespace {

at::Tensor to_input(const at::Tensor& pixels) { return pixels.to(torch::kFloat).div(255).unsqueeze(1); }

}  // namespace

at::Tensor shuffled(int64_t count, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return torch::randperm(count, generator, torch::kLong);
}

Batch get_batch(const Images& images, const at::Tensor& order, int64_t first, int64_t rows) {
  const at::Tensor chosen = order.narrow(0, first, rows);
  return {to_input(images.pixels.index_select(0, chosen)), images.labels.index_select(0, chosen)};
}

Batch get_filled_batch(const Images& images, int64_t first, int64_t rows) {
  const int64_t begin = std::min(first, images.size());
  const int64_t present = std::min(rows, images.size() - begin);
  auto pixels = torch::zeros({rows, images.pixels.size(1), images.pixels.size(2)}, torch::kByte);
  auto labels = torch::full({rows}, kNoLabel, torch::kLong);
  pixels.narrow(0, 0, present).copy_(images.pixels.narrow(0, begin, present));
  labels.narrow(0, 0, present).copy_(images.labels.narrow(0, begin, present));
  return {to_input(pixels), labels};
}

}  // namespace mnist
