// The distribution that the generator learns: eight Gaussians on a ring (Metz et al., "Unrolled
// Generative Adversarial Networks", ICLR 2017), and how much of it some points cover.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>

namespace gan {

constexpr int64_t kNumModes = 8;
constexpr double kRadius = 2;
constexpr double kDeviation = 0.1;  // of each Gaussian, along both axes

/// `count` points of the ring, [count, 2], float32.
at::Tensor draw_ring(int64_t count, at::Generator generator);

struct Coverage {
  int64_t modes = 0;     // that have at least 2 % of the points within three deviations
  double near_mode = 0;  // part of the points that lie so near to any mode
};

/// points: [n, 2], float32, n > 0. Points that are not finite are near to none.
Coverage coverage_of(const at::Tensor& points);

}  // namespace gan
