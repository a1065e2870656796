// lstm, transformer_encoder, transformer, gpt: sequences of tokens, masks, tied embedding and head.
#include <torch/torch.h>

#include "tests/support/model_zoo.h"
#include "tests/support/model_zoo_parts.h"

namespace smp::support {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr int64_t kVocab = 24;
constexpr int64_t kTokens = 6;
constexpr int64_t kWidth = 16;

std::vector<at::Tensor> tokens_and_next_tokens(int64_t batch, uint64_t seed) {
  auto text = InputSource(seed).integers(kVocab, {batch, kTokens + 1});
  return {text.narrow(1, 0, kTokens).contiguous(), text.narrow(1, 1, kTokens).contiguous()};
}

// out[0]: [batch, tokens, vocabulary]; in[1]: [batch, tokens]
BodyResult next_token_loss(const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& in) {
  return {F::cross_entropy(out[0].reshape({-1, kVocab}), in[1].reshape({-1})), {out[0].argmax(2).eq(in[1]).sum(1)}};
}

template <class Net>
ZooModel language_model(std::string name) {
  return {
      .name = std::move(name),
      .make = maker<Net>(),
      .make_inputs = tokens_and_next_tokens,
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> { return {as<Net>(net).forward(in[0])}; },
      .loss = next_token_loss,
      .has_random = true,
  };
}

// Sinusoids of Vaswani et al., NeurIPS 2017. [kTokens, 1, kWidth]
at::Tensor sinusoids() {
  auto place = torch::arange(kTokens, torch::kFloat).unsqueeze(1);
  auto rate = torch::exp(torch::arange(0, kWidth, 2, torch::kFloat) * (-std::log(1e4) / kWidth));
  auto table = torch::empty({kTokens, 1, kWidth});
  table.select(1, 0).slice(1, 0, kWidth, 2).copy_(torch::sin(place * rate));
  table.select(1, 0).slice(1, 1, kWidth, 2).copy_(torch::cos(place * rate));
  return table;
}

struct LstmModel : nn::Module {
  nn::Embedding embedding{kVocab, kWidth};
  nn::LSTM lstm{nn::LSTMOptions(kWidth, 20).num_layers(2).dropout(0.2).batch_first(true)};
  nn::Dropout dropout{0.2};
  nn::Linear decoder{20, kVocab};
  LstmModel() {
    register_module("embedding", embedding);
    register_module("lstm", lstm);
    register_module("dropout", dropout);
    register_module("decoder", decoder);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto [output, state] = lstm(dropout(embedding(tokens)));
    return decoder(dropout(output));
  }
};

// The positional encoding is a buffer, the causal mask is made in forward.
struct EncoderModel : nn::Module {
  nn::Embedding embedding{kVocab, kWidth};
  nn::TransformerEncoder encoder{nullptr};
  nn::Linear decoder{kWidth, kVocab};
  at::Tensor position;
  EncoderModel() {
    register_module("embedding", embedding);
    auto layer = nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(kWidth, 2).dim_feedforward(32).dropout(0.2));
    encoder = register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 3).norm(
                                             nn::AnyModule(nn::LayerNorm(nn::LayerNormOptions({kWidth}))))));
    register_module("decoder", decoder);
    position = register_buffer("position", sinusoids());
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embedding(tokens.t()) * std::sqrt(double(kWidth)) + position;
    auto mask = nn::TransformerImpl::generate_square_subsequent_mask(tokens.size(1)).to(x.device());
    return decoder(encoder(x, mask)).transpose(0, 1);
  }
};

// Encoder and decoder; every decoder layer reads the encoder's output. The positional encoding is a plain member.
struct TranslationModel : nn::Module {
  nn::Embedding source{kVocab, kWidth}, target{kVocab, kWidth};
  nn::Transformer transformer{nn::TransformerOptions(kWidth, 2, 2, 2).dim_feedforward(24).dropout(0.1)};
  nn::Linear generator{kWidth, kVocab};
  at::Tensor position = sinusoids();
  TranslationModel() {
    register_module("source", source);
    register_module("target", target);
    register_module("transformer", transformer);
    register_module("generator", generator);
  }
  at::Tensor forward(const at::Tensor& from, const at::Tensor& to) {
    const at::Tensor places = position.to(from.device());
    auto source_tokens = source(from.t()) + places;
    auto target_tokens = target(to.t()) + places;
    auto mask = nn::TransformerImpl::generate_square_subsequent_mask(to.size(1)).to(to.device());
    return generator(transformer(source_tokens, target_tokens, /*src_mask=*/at::Tensor(), mask)).transpose(0, 1);
  }
};

ZooModel transformer() {
  return {
      .name = "transformer",
      .make = maker<TranslationModel>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        auto target = tokens_and_next_tokens(batch, seed);
        return {InputSource(seed + 1).integers(kVocab, {batch, kTokens}), target[1], target[0]};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        return {as<TranslationModel>(net).forward(in[0], in[2])};
      },
      .loss = next_token_loss,
      .has_random = true,
  };
}

struct GptBlock : nn::Module {
  nn::LayerNorm norm1{nn::LayerNormOptions({kWidth})}, norm2{nn::LayerNormOptions({kWidth})};
  nn::Linear query_key_value{kWidth, 3 * kWidth}, project{kWidth, kWidth};
  nn::Linear grow{kWidth, 2 * kWidth}, shrink{2 * kWidth, kWidth};
  nn::Dropout dropout{0.1};
  GptBlock() {
    register_module("norm1", norm1);
    register_module("query_key_value", query_key_value);
    register_module("project", project);
    register_module("norm2", norm2);
    register_module("grow", grow);
    register_module("shrink", shrink);
    register_module("dropout", dropout);
  }
  at::Tensor attend(const at::Tensor& x) {
    auto parts = query_key_value(x).chunk(3, -1);
    for (auto& part : parts) part = part.unflatten(-1, {2, -1}).transpose(1, 2);
    auto y = torch::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{}, is_training() ? 0.1 : 0.0,
                                                 /*is_causal=*/true);
    return project(y.transpose(1, 2).reshape(x.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto hidden = x + dropout(attend(norm1(x)));
    return hidden + dropout(shrink(torch::gelu(grow(norm2(hidden)), "tanh")));
  }
};

// Radford et al., 2019: the head is the embedding, so the first and the last layer share a weight.
struct Gpt : nn::Module {
  nn::Embedding embedding{kVocab, kWidth}, position{kTokens, kWidth};
  std::vector<std::shared_ptr<GptBlock>> blocks;
  nn::LayerNorm norm{nn::LayerNormOptions({kWidth})};
  nn::Dropout dropout{0.1};
  Gpt() {
    register_module("embedding", embedding);
    register_module("position", position);
    register_module("dropout", dropout);
    for (int i = 0; i < 3; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<GptBlock>()));
    }
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& tokens) {
    auto places = torch::arange(tokens.size(1), tokens.options());
    auto x = dropout(embedding(tokens) + position(places));
    for (auto& block : blocks) x = block->forward(x);
    return F::linear(norm(x), embedding->weight);
  }
};

ZooModel gpt() {
  auto model = language_model<Gpt>("gpt");
  model.has_tied_weights = true;
  return model;
}

}  // namespace

void add_text_models(std::vector<ZooModel>& zoo) {
  zoo.push_back(language_model<LstmModel>("lstm"));
  zoo.push_back(language_model<EncoderModel>("transformer_encoder"));
  zoo.push_back(transformer());
  zoo.push_back(gpt());
}

}  // namespace smp::support
