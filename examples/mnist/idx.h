// Reading IDX files, the format in which MNIST is kept (Y. LeCun, "THE MNIST DATABASE of
// handwritten digits"). Nothing here is random or knows of smp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace mnist {

/// Reads unsigned bytes: two zero bytes, the type 0x08, the number of dimensions, each dimension as four bytes with the
/// highest first, then the data. Returns uint8 of those sizes on the CPU. Throws c10::ValueError for a file that cannot be
/// read, has another type or number of dimensions, is empty, cut short, longer than it says, or still packed with gzip.
at::Tensor read_idx(const std::string& path, int64_t num_dimensions);

/// Pictures and what they show.
struct Images {
  at::Tensor pixels;  // [n, rows, columns], uint8: 0 is background, 255 ink
  at::Tensor labels;  // [n], int64 in [0, 10)
  int64_t size() const { return pixels.size(0); }
};

struct Digits {
  Images train, test;
};

/// Reads train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte from a folder
/// (a dot in place of "-idx" too, as some archives have it). Throws c10::ValueError for a file that is missing, as read_idx
/// does, for a label above 9, and for numbers or sizes of images that do not fit together.
Digits read_digits(const std::string& folder);

}  // namespace mnist
