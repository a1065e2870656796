// How long a step takes where values pass stages on their way, and how long it was predicted to take: U-Nets, an encoder and
// a decoder, and a language model with tied weights. Two processes with two visits each: with two stages nothing passes one.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/measure.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
namespace nn = torch::nn;

constexpr int64_t kMicrobatches = 8, kTokens = 32, kVocabulary = 2000;
constexpr int kWarmUp = 5, kSteps = 15;

// Two convolutions.
nn::Sequential block(int64_t from, int64_t to) {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1)), nn::ReLU(),
                        nn::Conv2d(nn::Conv2dOptions(to, to, 3).padding(1)), nn::ReLU());
}

// Halves the image level by level, and on the way back puts beside it what it was there.
struct UNet : nn::Module {
  UNet(int64_t width, int levels)
      : bottom(block(width << (levels - 1), width << levels)), head(nn::Conv2dOptions(width, 2, 1)) {
    for (int level = 0; level < levels; ++level) {
      const int64_t wide = width << level;
      down.push_back(register_module("down" + std::to_string(level), block(level == 0 ? 3 : wide / 2, wide)));
      widen.push_back(register_module("widen" + std::to_string(level),
                                      nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2 * wide, wide, 2).stride(2))));
      up.push_back(register_module("up" + std::to_string(level), block(2 * wide, wide)));
    }
    register_module("bottom", bottom);
    register_module("head", head);
  }
  at::Tensor forward(at::Tensor x) {
    std::vector<at::Tensor> skips;
    for (auto& level : down) {
      skips.push_back(level->forward(x));
      x = torch::max_pool2d(skips.back(), 2);
    }
    x = bottom->forward(x);
    for (size_t level = down.size(); level-- > 0;) {
      x = up[level]->forward(torch::cat({skips[level], widen[level]->forward(x)}, 1));
    }
    return head->forward(x);
  }
  std::vector<nn::Sequential> down, up;
  std::vector<nn::ConvTranspose2d> widen;
  nn::Sequential bottom;
  nn::Conv2d head;
};

// Every layer of the decoder reads what the encoder makes.
struct Translator : nn::Module {
  static constexpr int64_t kWidth = 128;
  at::Tensor forward(const at::Tensor& from, const at::Tensor& to) {
    return head->forward(transformer->forward(source->forward(from.t()), target->forward(to.t()))).transpose(0, 1);
  }
  nn::Embedding source = register_module("source", nn::Embedding(kVocabulary, kWidth));
  nn::Embedding target = register_module("target", nn::Embedding(kVocabulary, kWidth));
  nn::Transformer transformer = register_module(
      "transformer", nn::Transformer(nn::TransformerOptions(kWidth, 4, 3, 3).dim_feedforward(512).dropout(0)));
  nn::Linear head = register_module("head", nn::Linear(kWidth, kVocabulary));
};

// The embedding's weight is read again at the end.
struct TiedLm : nn::Module {
  static constexpr int64_t kWidth = 128;
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = encoder->forward(embedding->forward(tokens.t()));
    return torch::linear(x, embedding->weight).transpose(0, 1);
  }
  nn::Embedding embedding = register_module("embedding", nn::Embedding(kVocabulary, kWidth));
  nn::TransformerEncoder encoder = register_module(
      "encoder",
      nn::TransformerEncoder(nn::TransformerEncoderOptions(
          nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(kWidth, 4).dim_feedforward(512).dropout(0)), 6)));
};

at::Tensor class_loss(const at::Tensor& scores, const at::Tensor& target) {
  return nn::functional::cross_entropy(scores.reshape({-1, scores.size(-1)}), target.reshape({-1}));
}

at::Tensor tokens(int64_t rows) { return torch::randint(kVocabulary, {rows, kTokens}); }

// `inputs`: those of the net, then the target.
template <typename Net, typename Loss>
void measure(const std::string& name, std::shared_ptr<Net> net, const std::vector<at::Tensor>& inputs, const Loss& loss_of) {
  smp::DistributedModel<Net> model(net);
  auto step = smp::step([&](at::Tensor input, at::Tensor second, at::Tensor target) {
    auto loss = loss_of(model, input, second, target);
    model.backward(loss);
    return loss;
  });
  std::vector<double> seconds;
  for (int i = -kWarmUp; i < kSteps; ++i) {
    for (const auto& parameter : net->parameters()) parameter.mutable_grad().reset();
    smp::barrier();
    const double taken = seconds_of([&] {
      step(inputs[0], inputs[1], inputs[2]);
      smp::barrier();
    });
    if (i >= 0) seconds.push_back(taken);
  }
  if (smp::rank() != 0) return;
  const double measured_ms = 1e3 * median(seconds), predicted_ms = 1e3 * model.predicted_step_s();
  report(name, measured_ms, "ms", {{"predicted ms", predicted_ms}, {"predicted to measured", predicted_ms / measured_ms}});
}

void measure_u_net(const std::string& name, int64_t width, int64_t pixels) {
  constexpr int64_t kRows = kMicrobatches * 2;
  const auto target = torch::randint(2, {kRows, pixels, pixels});
  measure(name, std::make_shared<UNet>(width, 3), {torch::randn({kRows, 3, pixels, pixels}), target, target},
          [](auto& model, const at::Tensor& image, const at::Tensor&, const at::Tensor& classes) {
            return class_loss(model(image).permute({0, 2, 3, 1}), classes);
          });
}

void measure_translator(const std::string& name) {
  constexpr int64_t kRows = kMicrobatches * 2;
  measure(name, std::make_shared<Translator>(), {tokens(kRows), tokens(kRows), tokens(kRows)},
          [](auto& model, const at::Tensor& from, const at::Tensor& to, const at::Tensor& next) {
            return class_loss(model(from, to), next);
          });
}

void measure_tied_lm(const std::string& name) {
  constexpr int64_t kRows = kMicrobatches * 2;
  const auto next = tokens(kRows);
  measure(name, std::make_shared<TiedLm>(), {tokens(kRows), next, next},
          [](auto& model, const at::Tensor& text, const at::Tensor&, const at::Tensor& target) {
            return class_loss(model(text), target);
          });
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  smp::Config config;
  config.microbatches = kMicrobatches;
  config.virtual_stages = 2;
  config.cost = smp::CostSource::kMeasured;
  config.cost_cache = "off";
  config.log_level = smp::LogLevel::kOff;
  smp::init(config);
  require(smp::size() == 2, "expected two processes; start it with: smp run -np 2 bench_skips");
  torch::manual_seed(0);
  const auto run = [&](const std::string& name, const auto& measure_it) {
    if (is_wanted(argc, argv, name)) measure_it(name);
  };
  run("skips_u_net_ms", [](const std::string& name) { measure_u_net(name, 8, 64); });
  run("skips_u_net_wide_ms", [](const std::string& name) { measure_u_net(name, 32, 32); });
  run("skips_encoder_decoder_ms", measure_translator);
  run("skips_tied_lm_ms", measure_tied_lm);
  smp::shutdown();
}
