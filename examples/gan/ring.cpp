// Drawing points, and assigning points to modes.
#include "examples/gan/ring.h"

#include <torch/torch.h>

#include <numbers>

namespace gan {
namespace {

at::Tensor centres_of(const at::Tensor& modes) {
  const at::Tensor angle = modes.to(torch::kFloat) * (2 * std::numbers::pi / kNumModes);
  return torch::stack({angle.cos(), angle.sin()}, 1) * kRadius;
}

}  // namespace

at::Tensor draw_ring(int64_t count, at::Generator generator) {
  const at::Tensor modes = torch::randint(kNumModes, {count}, generator, torch::kLong);
  return centres_of(modes) + torch::randn({count, 2}, generator) * kDeviation;
}

Coverage coverage_of(const at::Tensor& points) {
  constexpr double kLeastPart = 0.02;  // a sixth of what each mode has in the ring itself
  constexpr double kNear = 3 * kDeviation;
  TORCH_CHECK_VALUE(points.dim() == 2 && points.size(1) == 2 && points.size(0) > 0,
                    "gan: expected points of sizes [n, 2], got ", points.sizes(), ".");
  const at::Tensor distance = (points.unsqueeze(1) - centres_of(torch::arange(kNumModes))).square().sum(2).sqrt();
  const at::Tensor share = distance.le(kNear).to(torch::kDouble).mean(0);  // by mode; a point is near to one at most
  return {.modes = share.ge(kLeastPart).sum().item<int64_t>(), .near_mode = share.sum().item<double>()};
}

}  // namespace gan
