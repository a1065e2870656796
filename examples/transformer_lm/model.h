// The language model of the example: an ordinary torch::nn::Module that knows nothing of smp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace transformer_lm {

struct ModelOptions {
  int64_t vocab = 0;         // number of distinct tokens; must be set
  int64_t width = 200;       // of the embedding; even, and divisible by `heads`
  int64_t heads = 4;         // of each attention
  int64_t hidden = 200;      // width of each feed-forward block
  int64_t layers = 2;        // encoder layers
  double dropout = 0.2;      // probability, everywhere
  int64_t max_tokens = 512;  // longest sequence that the positional encoding covers
};

/// Embedding, sinusoidal positional encoding, encoder layers under a causal mask, linear decoder
/// (Vaswani et al., NeurIPS 2017, in the form of PyTorch's word language model tutorial).
///
///   TransformerLm net({.vocab = 1000});
///   auto logits = net.forward(tokens);   // [batch, T] int64 -> [batch, T, vocab]
class TransformerLm : public torch::nn::Module {
 public:
  /// Throws c10::ValueError for sizes that do not fit together.
  explicit TransformerLm(const ModelOptions& options);

  /// tokens: [batch, T], int64 in [0, vocab), T <= max_tokens. Returns the logits of the next token at every place, [batch,
  /// T, vocab]; place t sees tokens 0 ... t only. Throws c10::ValueError for a longer sequence.
  at::Tensor forward(const at::Tensor& tokens);

 private:
  ModelOptions options_;
  torch::nn::Embedding embedding_{nullptr};
  at::Tensor position_;  // buffer [max_tokens, 1, width]
  torch::nn::Dropout dropout_{nullptr};
  torch::nn::ModuleList encoder_;
  torch::nn::Linear decoder_{nullptr};
};

}  // namespace transformer_lm
