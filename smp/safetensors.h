// Named tensors in a file, in the safetensors format (huggingface.co/docs/safetensors). Runs nothing that the file holds.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace smp {

/// What a safetensors file holds: dense CPU tensors and texts.
///
///   smp::Safetensors written{.tensors = {{"fc.weight", weight}}, .metadata = {{"epoch", "3"}}};
///   smp::write_safetensors("weights.safetensors", written);   // Python's safetensors reads it too
///   smp::Safetensors file = smp::read_safetensors("weights.safetensors");
struct Safetensors {
  std::vector<std::pair<std::string, at::Tensor>> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

/// Writes `path` as a whole or not at all: under a temporary name next to it, to the disk, then renamed. Tensors of bool,
/// (u)int8 to 64, half, bfloat16, float and double in any strides. Throws c10::ValueError, before anything is written, for
/// other tensors, a name that comes twice or that the format reserves; c10::Error, with the system's reason, when the file
/// cannot be written, and then `path` is as it was.
void write_safetensors(const std::string& path, const Safetensors& file);

/// Reads a file of which nothing is believed: lengths, types, shapes and places of all tensors are
/// checked before the first of them is made. Throws c10::ValueError that names `path` and what is
/// wrong with it; c10::Error, with the system's reason, when it cannot be read.
Safetensors read_safetensors(const std::string& path);

}  // namespace smp
