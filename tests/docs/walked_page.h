// A page of docs/ whose C++ blocks, one after the other, are one program over a small Net.
#pragma once

#include <torch/torch.h>

#include <iostream>
#include <map>
#include <string>

#include "smp/smp.h"

namespace walked_page {

struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(8, 8)); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

/// The pages of this program, by name. Each shuts down as a reader's program does, with its models alive.
inline std::map<std::string, int (*)()>& pages() {
  static std::map<std::string, int (*)()> all;
  return all;
}

}  // namespace walked_page
