// Building and calling the language model.
#include "examples/transformer_lm/model.h"

#include <torch/torch.h>

#include <cmath>
#include <utility>

namespace transformer_lm {
namespace {

namespace nn = torch::nn;

void check(const ModelOptions& options) {
  TORCH_CHECK_VALUE(options.vocab > 0, "transformer_lm: expected vocab > 0, got ", options.vocab,
                    ". Set ModelOptions::vocab to the number of distinct tokens.");
  const std::pair<const char*, int64_t> sizes[] = {{"width", options.width},
                                                   {"heads", options.heads},
                                                   {"hidden", options.hidden},
                                                   {"layers", options.layers},
                                                   {"max_tokens", options.max_tokens}};
  for (const auto& [name, size] : sizes) {
    TORCH_CHECK_VALUE(size > 0, "transformer_lm: expected ", name, " > 0, got ", size, ". Change ModelOptions::", name, ".");
  }
  TORCH_CHECK_VALUE(options.dropout >= 0 && options.dropout <= 1,
                    "transformer_lm: expected a probability of dropout in [0, 1], got ", options.dropout,
                    ". Change ModelOptions::dropout.");
  TORCH_CHECK_VALUE(options.width % options.heads == 0 && options.width % 2 == 0,
                    "transformer_lm: expected an even width divisible by heads=", options.heads, ", got ", options.width,
                    ". Change ModelOptions::width or heads.");
}

// Row t holds sin and cos of t at falling frequencies, in turn. [max_tokens, 1, width]
at::Tensor sinusoids(int64_t max_tokens, int64_t width) {
  auto place = torch::arange(max_tokens, torch::kFloat).unsqueeze(1);
  auto rate = torch::exp(torch::arange(0, width, 2, torch::kFloat) * (-std::log(1e4) / static_cast<double>(width)));
  return torch::stack({torch::sin(place * rate), torch::cos(place * rate)}, 2).reshape({max_tokens, 1, width});
}

}  // namespace

TransformerLm::TransformerLm(const ModelOptions& options) : options_(options) {
  check(options);
  embedding_ = register_module("embedding", nn::Embedding(options.vocab, options.width));
  position_ = register_buffer("position", sinusoids(options.max_tokens, options.width));
  dropout_ = register_module("dropout", nn::Dropout(options.dropout));
  register_module("encoder", encoder_);
  for (int64_t i = 0; i < options.layers; ++i) {
    encoder_->push_back(nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(options.width, options.heads)
                                                        .dim_feedforward(options.hidden)
                                                        .dropout(options.dropout)));
  }
  decoder_ = register_module("decoder", nn::Linear(options.width, options.vocab));
  nn::init::uniform_(embedding_->weight, -0.1, 0.1);
  nn::init::uniform_(decoder_->weight, -0.1, 0.1);
  nn::init::zeros_(decoder_->bias);
}

at::Tensor TransformerLm::forward(const at::Tensor& tokens) {
  const int64_t length = tokens.size(1);
  TORCH_CHECK_VALUE(length <= options_.max_tokens, "transformer_lm: expected at most max_tokens=", options_.max_tokens,
                    " tokens, got ", length, ". Cut the text into shorter sequences or raise ModelOptions::max_tokens.");
  // The encoder layers want the tokens first: [T, batch, width].
  auto x = embedding_(tokens.t()) * std::sqrt(static_cast<double>(options_.width));
  x = dropout_(x + position_.narrow(0, 0, length));
  auto causal = nn::TransformerImpl::generate_square_subsequent_mask(length);
  for (const auto& layer : *encoder_) {
    x = layer->as<nn::TransformerEncoderLayer>()->forward(x, causal.to(x.device()));
  }
  return decoder_(x).transpose(0, 1);
}

}  // namespace transformer_lm
