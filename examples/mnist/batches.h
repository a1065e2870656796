// Cutting a set of images into batches.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "examples/mnist/idx.h"

namespace mnist {

struct Batch {
  at::Tensor images;  // [rows, 1, height, width], float32 in [0, 1]
  at::Tensor labels;  // [rows], int64; kNoLabel where the set has ended
};

/// Label of a row that only fills a batch: no digit, so never guessed right, and cross-entropy's ignore_index.
constexpr int64_t kNoLabel = -100;

/// A permutation of `count` numbers, [count], int64; the same on every rank that gives the same seed.
at::Tensor shuffled(int64_t count, int64_t seed);

/// Rows first ... first + rows - 1 of `images` in that order ([n], int64).
Batch get_batch(const Images& images, const at::Tensor& order, int64_t first, int64_t rows);

/// The same in the set's own order; after its end come rows without ink and without label. So a
/// test counts every image once, whatever its number, in steps of one size.
Batch get_filled_batch(const Images& images, int64_t first, int64_t rows);

}  // namespace mnist
