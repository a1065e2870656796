// The models, from LibTorch's own layers and, where the C++ frontend calls other operators than Python's, by hand.
#include "benchmarks/peers/models.h"

#include <torch/torch.h>

#include <cmath>
#include <map>

namespace smp::benchmarks {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

// Of inputs with three dimensions too in one operator, which torch::nn::Linear makes of those with two only.
at::Tensor linear(const nn::Linear& layer, const at::Tensor& x) { return at::linear(x, layer->weight, layer->bias); }

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& y) {
  return F::cross_entropy(logits.flatten(0, 1), y.flatten());
}

// [batch, tokens, width] -> [batch, heads, tokens, width / heads]
at::Tensor split_heads(const at::Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
}

at::Tensor merge_heads(const at::Tensor& x) {
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), x.size(1) * x.size(3)});
}

// torch.nn.TransformerEncoderLayer(batch_first=True) of Python, which calls scaled_dot_product_attention, with its copies:
// of all projections, and of tokens before batch and back.
struct EncoderLayer : nn::Module {
  EncoderLayer(int64_t width, int64_t num_heads, int64_t hidden, double rate)
      : heads(num_heads),
        dropout(rate),
        in(register_module("in", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        up(register_module("up", nn::Linear(width, hidden))),
        down(register_module("down", nn::Linear(hidden, width))),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))) {}

  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm1(x + drop(attend(x)));
    return norm2(y + drop(linear(down, drop(torch::relu(linear(up, y))))));
  }
  at::Tensor attend(const at::Tensor& x) {
    const int64_t batch = x.size(0), tokens = x.size(1), width = x.size(2);
    const at::Tensor projected =
        linear(in, x.transpose(0, 1)).unflatten(-1, {3, width}).unsqueeze(0).transpose(0, -2).squeeze(-2).contiguous();
    const auto part = [&](int64_t i) {
      const at::Tensor of_heads = projected[i].view({tokens, batch * heads, width / heads}).transpose(0, 1);
      return of_heads.view({batch, heads, tokens, width / heads});
    };
    const at::Tensor q = part(0), k = part(1), v = part(2);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(q, k, v, {}, is_training() ? dropout : 0.0, /*is_causal=*/true);
    const at::Tensor rows = mixed.permute({2, 0, 1, 3}).contiguous().view({tokens * batch, width});
    return linear(out, rows).view({tokens, batch, width}).transpose(0, 1);
  }
  at::Tensor drop(const at::Tensor& x) const { return torch::dropout(x, dropout, is_training()); }

  int64_t heads;
  double dropout;
  nn::Linear in, out, up, down;
  nn::LayerNorm norm1, norm2;
};

struct LanguageModel : PeerNet {
  static constexpr int64_t kVocabulary = 10000, kTokens = 35;
  LanguageModel(int64_t width, int64_t heads, int64_t hidden, int layers_wanted)
      : table(register_module("table", nn::Embedding(kVocabulary, width))),
        head(nn::Linear(width, kVocabulary)),
        scale(std::sqrt(static_cast<double>(width))) {
    const at::Tensor at = torch::arange(kTokens).unsqueeze(1);
    const at::Tensor frequency = torch::exp(torch::arange(0, width, 2) * (-std::log(10000.0) / static_cast<double>(width)));
    at::Tensor values = torch::zeros({1, kTokens, width});
    values.slice(2, 0, width, 2).copy_(torch::sin(at * frequency));
    values.slice(2, 1, width, 2).copy_(torch::cos(at * frequency));
    positions = register_buffer("positions", values);
    for (int i = 0; i < layers_wanted; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), std::make_shared<EncoderLayer>(width, heads, hidden, 0.2)));
    }
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor y = table(x) * scale + positions;
    for (const auto& layer : layers) y = layer->forward(y);
    return linear(head, y);
  }
  nn::Embedding table;
  std::vector<std::shared_ptr<EncoderLayer>> layers;
  nn::Linear head;
  at::Tensor positions;
  double scale;
};

PeerModel language_model(int64_t width, int64_t heads, int64_t hidden, int layers) {
  constexpr int64_t kBatch = 32;
  const auto tokens = [] {
    return torch::randint(LanguageModel::kVocabulary, {kBatch, LanguageModel::kTokens}, torch::kLong);
  };
  return {std::make_shared<LanguageModel>(width, heads, hidden, layers), tokens(), tokens(), token_loss};
}

struct Mlp : PeerNet {
  Mlp(int64_t width, int layers_wanted) {
    for (int i = 0; i < layers_wanted; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), nn::Linear(width, width)));
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor y = x;
    for (auto& layer : layers) y = torch::relu(layer(y));
    return y;
  }
  std::vector<nn::Linear> layers;
};

PeerModel mlp(int64_t width, int layers, int64_t batch) {
  return {std::make_shared<Mlp>(width, layers), torch::randn({batch, width}), torch::randn({batch, width}),
          [](const at::Tensor& output, const at::Tensor& y) { return torch::mse_loss(output, y); }};
}

// transformers.pytorch_utils.Conv1D: a Linear with the weight the other way round.
struct Conv1D : nn::Module {
  Conv1D(int64_t in, int64_t out)
      : weight(register_parameter("weight", torch::randn({in, out}) * 0.02)),
        bias(register_parameter("bias", torch::zeros({out}))) {}
  at::Tensor forward(const at::Tensor& x) const {
    return torch::addmm(bias, x.view({-1, x.size(-1)}), weight).view({x.size(0), x.size(1), weight.size(1)});
  }
  at::Tensor weight, bias;
};

// GPT2Block with sdpa attention and the activation "gelu_new", as transformers writes it.
struct Gpt2Block : nn::Module {
  Gpt2Block(int64_t width, int64_t num_heads, double rate)
      : heads(num_heads),
        dropout(rate),
        norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        attention(register_module("attention", std::make_shared<Conv1D>(width, 3 * width))),
        projection(register_module("projection", std::make_shared<Conv1D>(width, width))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        up(register_module("up", std::make_shared<Conv1D>(width, 4 * width))),
        down(register_module("down", std::make_shared<Conv1D>(4 * width, width))) {}

  at::Tensor forward(const at::Tensor& x) {
    const auto parts = attention->forward(norm1(x)).split(x.size(2), 2);
    const at::Tensor mixed = at::scaled_dot_product_attention(split_heads(parts[0], heads), split_heads(parts[1], heads),
                                                              split_heads(parts[2], heads), {},
                                                              is_training() ? dropout : 0.0, /*is_causal=*/true);
    const at::Tensor y = drop(projection->forward(merge_heads(mixed))) + x;
    return y + drop(down->forward(gelu_new(up->forward(norm2(y)))));
  }
  // In Python's order, which C++ leaves open within an expression: gradients of x are added in it.
  static at::Tensor gelu_new(const at::Tensor& x) {
    const at::Tensor half = 0.5 * x;
    return half * (1.0 + torch::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * torch::pow(x, 3.0))));
  }
  at::Tensor drop(const at::Tensor& x) const { return torch::dropout(x, dropout, is_training()); }

  int64_t heads;
  double dropout;
  nn::LayerNorm norm1;
  std::shared_ptr<Conv1D> attention, projection;
  nn::LayerNorm norm2;
  std::shared_ptr<Conv1D> up, down;
};

struct Gpt2 : PeerNet {
  static constexpr int64_t kVocabulary = 10000, kTokens = 128, kWidth = 256, kHeads = 4;
  static constexpr int kLayers = 8;
  static constexpr double kDropout = 0.1;
  Gpt2()
      : words(register_module("words", nn::Embedding(kVocabulary, kWidth))),
        positions(register_module("positions", nn::Embedding(kTokens, kWidth))),
        norm(nn::LayerNormOptions({kWidth})),
        head(nn::LinearOptions(kWidth, kVocabulary).bias(false)) {
    for (int i = 0; i < kLayers; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<Gpt2Block>(kWidth, kHeads, kDropout)));
    }
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor y = torch::dropout(words(x) + positions(torch::arange(x.size(1))), kDropout, is_training());
    for (const auto& block : blocks) y = block->forward(y);
    return linear(head, norm(y));
  }
  nn::Embedding words, positions;
  std::vector<std::shared_ptr<Gpt2Block>> blocks;
  nn::LayerNorm norm;
  nn::Linear head;
};

PeerModel gpt2() {
  constexpr int64_t kBatch = 8;
  const auto tokens = [] { return torch::randint(Gpt2::kVocabulary, {kBatch, Gpt2::kTokens}, torch::kLong); };
  return {std::make_shared<Gpt2>(), tokens(), tokens(), token_loss};
}

nn::Conv2d conv3(int64_t in, int64_t out, int64_t stride, bool bias) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(bias));
}

struct BasicBlock : nn::Module {
  BasicBlock(int64_t in, int64_t out, int64_t stride)
      : a(register_module("a", conv3(in, out, stride, false))),
        norm_a(register_module("norm_a", nn::BatchNorm2d(out))),
        b(register_module("b", conv3(out, out, 1, false))),
        norm_b(register_module("norm_b", nn::BatchNorm2d(out))) {
    if (in != out || stride != 1) skip = register_module("skip", nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride)));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = norm_b(b(torch::relu(norm_a(a(x)))));
    return torch::relu(y + (skip ? skip(x) : x));
  }
  nn::Conv2d a;
  nn::BatchNorm2d norm_a;
  nn::Conv2d b;
  nn::BatchNorm2d norm_b;
  nn::Conv2d skip = nullptr;
};

struct ResNet : PeerNet {
  static constexpr int64_t kWidth = 32;
  ResNet()
      : stem(register_module("stem", conv3(3, kWidth, 1, true))),
        stem_norm(register_module("stem_norm", nn::BatchNorm2d(kWidth))),
        head(nn::Linear(4 * kWidth, 10)) {
    int64_t in = kWidth;
    for (const int64_t factor : {1, 1, 1, 2, 2, 2, 4, 4, 4}) {
      const int64_t out = factor * kWidth;
      blocks.push_back(register_module("block" + std::to_string(blocks.size()),
                                       std::make_shared<BasicBlock>(in, out, in == out ? 1 : 2)));
      in = out;
    }
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) override {
    at::Tensor y = torch::relu(stem_norm(stem(x)));
    for (const auto& block : blocks) y = block->forward(y);
    return head(torch::adaptive_avg_pool2d(y, {1, 1}).flatten(1));
  }
  nn::Conv2d stem;
  nn::BatchNorm2d stem_norm;
  std::vector<std::shared_ptr<BasicBlock>> blocks;
  nn::Linear head;
};

PeerModel resnet() {
  constexpr int64_t kBatch = 64;
  return {std::make_shared<ResNet>(), torch::randn({kBatch, 3, 32, 32}), torch::randint(10, {kBatch}, torch::kLong),
          [](const at::Tensor& output, const at::Tensor& y) { return F::cross_entropy(output, y); }};
}

const std::map<std::string, std::function<PeerModel()>>& makers() {
  static const std::map<std::string, std::function<PeerModel()>> all = {
      {"lm-small", [] { return language_model(200, 4, 200, 2); }},
      {"lm-medium", [] { return language_model(256, 4, 1024, 8); }},
      {"mlp-tiny", [] { return mlp(64, 64, 256); }},
      {"mlp-wide", [] { return mlp(512, 16, 512); }},
      {"gpt2", gpt2},
      {"resnet", resnet},
  };
  return all;
}

}  // namespace

std::vector<std::string> peer_model_names() {
  std::vector<std::string> names;
  for (const auto& [name, make] : makers()) names.push_back(name);
  return names;
}

PeerModel make_peer_model(const std::string& name) {
  const auto found = makers().find(name);
  TORCH_CHECK_VALUE(found != makers().end(), "expected one of ", c10::Join(", ", peer_model_names()), ", got ", name);
  torch::manual_seed(7);
  return found->second();
}

}  // namespace smp::benchmarks
