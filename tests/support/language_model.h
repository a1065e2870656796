// A GPT of plain functions, whose parameters are made where they are to be: 640 million random numbers take a host seconds.
#pragma once

#include <torch/torch.h>

namespace smp::support {

struct GptOptions {
  int64_t width = 256, layers = 12, vocab = 8192, tokens = 128;
  int64_t heads() const { return width / 64; }
};

/// Radford et al., 2019, without dropout. Forward gives the mean loss of the next token.
class Gpt : public torch::nn::Module {
 public:
  Gpt(const GptOptions& options, at::Device device) : options_(options) {
    const int64_t width = options.width;
    const auto made = [&](const std::string& name, at::IntArrayRef sizes, double scale) {
      const at::Tensor value = torch::randn(sizes, at::TensorOptions(device)).mul_(scale);
      return register_parameter(name, value);
    };
    embedding_ = made("embedding", {options.vocab, width}, 0.02);
    positions_ = made("positions", {options.tokens, width}, 0.02);
    for (int64_t i = 0; i < options.layers; ++i) {
      const std::string at = "layer" + std::to_string(i) + "_";
      blocks_.push_back({made(at + "norm1", {width}, 1), made(at + "norm1_bias", {width}, 0.02),
                         made(at + "attend", {3 * width, width}, 0.02), made(at + "project", {width, width}, 0.02),
                         made(at + "norm2", {width}, 1), made(at + "norm2_bias", {width}, 0.02),
                         made(at + "grow", {4 * width, width}, 0.02), made(at + "grow_bias", {4 * width}, 0.02),
                         made(at + "shrink", {width, 4 * width}, 0.02), made(at + "shrink_bias", {width}, 0.02)});
    }
    head_ = made("head", {options.vocab, width}, 0.02);
  }

  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    const int64_t width = options_.width, batch = tokens.size(0);
    at::Tensor x = torch::embedding(embedding_, tokens) + positions_;
    for (const Block& block : blocks_) {
      auto parts = torch::linear(torch::layer_norm(x, {width}, block.norm1, block.norm1_bias), block.attend).chunk(3, -1);
      for (at::Tensor& part : parts) {
        part = part.view({batch, options_.tokens, options_.heads(), width / options_.heads()}).transpose(1, 2);
      }
      const at::Tensor attended =
          at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{}, 0.0, /*is_causal=*/true);
      x = x + torch::linear(attended.transpose(1, 2).reshape({batch, options_.tokens, width}), block.project);
      const at::Tensor grown =
          torch::linear(torch::layer_norm(x, {width}, block.norm2, block.norm2_bias), block.grow, block.grow_bias);
      x = x + torch::linear(torch::gelu(grown, "tanh"), block.shrink, block.shrink_bias);
    }
    const at::Tensor logits = torch::linear(x, head_);
    return torch::cross_entropy_loss(logits.view({-1, options_.vocab}), targets.reshape({-1}));
  }

 private:
  struct Block {
    at::Tensor norm1, norm1_bias, attend, project, norm2, norm2_bias, grow, grow_bias, shrink, shrink_bias;
  };
  GptOptions options_;
  at::Tensor embedding_, positions_, head_;
  std::vector<Block> blocks_;
};

}  // namespace smp::support
