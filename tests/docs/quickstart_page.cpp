// The C++ blocks of docs/quickstart.md, one after the other, as one program.
#include <torch/torch.h>

#include <iostream>

#include "smp/smp.h"

namespace {

struct NetImpl : torch::nn::Module {
  NetImpl() { layer = register_module("layer", torch::nn::Linear(8, 8)); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Net);

}  // namespace

int main() {
#include "quickstart_page_blocks.inc"
  smp::shutdown();
}
