// vit, mixer, convnext: transposes and permutes around norms, so that strides matter.
#include <torch/torch.h>

#include "tests/support/model_zoo.h"
#include "tests/support/model_zoo_parts.h"

namespace smp::support {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

constexpr int64_t kClasses = 6;

BodyResult smoothed_classification(const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& in) {
  return {F::cross_entropy(out[0], in[1], F::CrossEntropyFuncOptions().label_smoothing(0.1)), {out[0], out[0].argmax(1)}};
}

struct VitBlock : nn::Module {
  nn::LayerNorm norm1{nn::LayerNormOptions({16})}, norm2{nn::LayerNormOptions({16})};
  nn::MultiheadAttention attention{nn::MultiheadAttentionOptions(16, 2).dropout(0.1)};
  nn::Linear grow{16, 32}, shrink{32, 16};
  nn::Dropout dropout{0.1};
  VitBlock() {
    register_module("norm1", norm1);
    register_module("attention", attention);
    register_module("norm2", norm2);
    register_module("grow", grow);
    register_module("shrink", shrink);
    register_module("dropout", dropout);
  }
  // x: [batch, tokens, 16]; the attention module wants tokens first.
  at::Tensor forward(const at::Tensor& x) {
    auto y = norm1(x).transpose(0, 1);
    auto attended = std::get<0>(attention(y, y, y)).transpose(0, 1);
    auto hidden = x + dropout(attended);
    return hidden + dropout(shrink(torch::gelu(grow(norm2(hidden)))));
  }
};

// Dosovitskiy et al., ICLR 2021, with a class token that is expanded over the batch.
struct Vit : nn::Module {
  nn::Conv2d stem{nn::Conv2dOptions(3, 12, 2).stride(2)};
  nn::Linear project{12, 16};
  at::Tensor class_token, position;
  std::shared_ptr<VitBlock> block0 = std::make_shared<VitBlock>();
  std::shared_ptr<VitBlock> block1 = std::make_shared<VitBlock>();
  nn::LayerNorm norm{nn::LayerNormOptions({16})};
  nn::Linear head{16, kClasses};
  Vit() {
    register_module("stem", stem);
    register_module("project", project);
    class_token = register_parameter("class_token", 0.02 * torch::randn({1, 1, 16}));
    position = register_parameter("position", 0.02 * torch::randn({1, 17, 16}));
    register_module("block0", block0);
    register_module("block1", block1);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& image) {
    auto patches = project(stem(image).flatten(2).transpose(1, 2));
    auto token = class_token.expand({patches.size(0), -1, -1});
    auto x = torch::cat({token, patches}, 1) + position;
    x = block1->forward(block0->forward(x));
    return head(norm(x).select(1, 0));
  }
};

struct MixerBlock : nn::Module {
  nn::LayerNorm norm1{nn::LayerNormOptions({12})}, norm2{nn::LayerNormOptions({12})};
  nn::Linear tokens1{16, 24}, tokens2{24, 16}, channels1{12, 24}, channels2{24, 12};
  MixerBlock() {
    register_module("norm1", norm1);
    register_module("tokens1", tokens1);
    register_module("tokens2", tokens2);
    register_module("norm2", norm2);
    register_module("channels1", channels1);
    register_module("channels2", channels2);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto mixed = tokens2(torch::gelu(tokens1(norm1(x).transpose(1, 2)))).transpose(1, 2);
    auto y = x + mixed;
    return y + channels2(torch::gelu(channels1(norm2(y))));
  }
};

// Tolstikhin et al., NeurIPS 2021.
struct Mixer : nn::Module {
  nn::Conv2d stem{nn::Conv2dOptions(3, 12, 2).stride(2)};
  std::shared_ptr<MixerBlock> block0 = std::make_shared<MixerBlock>();
  std::shared_ptr<MixerBlock> block1 = std::make_shared<MixerBlock>();
  nn::LayerNorm norm{nn::LayerNormOptions({12})};
  nn::Linear head{12, kClasses};
  Mixer() {
    register_module("stem", stem);
    register_module("block0", block0);
    register_module("block1", block1);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& image) {
    auto x = stem(image).flatten(2).transpose(1, 2);
    x = block1->forward(block0->forward(x));
    return head(norm(x).mean(1));
  }
};

// Liu et al., CVPR 2022: channels last between two permutes, with a learnt scale per channel.
struct ConvNextBlock : nn::Module {
  nn::Conv2d depthwise{nn::Conv2dOptions(8, 8, 3).padding(1).groups(8)};
  nn::LayerNorm norm{nn::LayerNormOptions({8}).eps(1e-6)};
  nn::Linear grow{8, 24}, shrink{24, 8};
  at::Tensor layer_scale;
  ConvNextBlock() {
    register_module("depthwise", depthwise);
    register_module("norm", norm);
    register_module("grow", grow);
    register_module("shrink", shrink);
    layer_scale = register_parameter("layer_scale", torch::full({8}, 0.1));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = norm(depthwise(x).permute({0, 2, 3, 1}));
    y = layer_scale * shrink(torch::gelu(grow(y)));
    return x + y.permute({0, 3, 1, 2});
  }
};

struct ConvNext : nn::Module {
  nn::Conv2d stem{nn::Conv2dOptions(3, 8, 2).stride(2)};
  std::shared_ptr<ConvNextBlock> block0 = std::make_shared<ConvNextBlock>();
  std::shared_ptr<ConvNextBlock> block1 = std::make_shared<ConvNextBlock>();
  nn::LayerNorm norm{nn::LayerNormOptions({8})};
  nn::Linear head{8, kClasses};
  ConvNext() {
    register_module("stem", stem);
    register_module("block0", block0);
    register_module("block1", block1);
    register_module("norm", norm);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& image) {
    auto x = block1->forward(block0->forward(stem(image)));
    return head(norm(x.mean({2, 3})));
  }
};

template <class Net>
ZooModel image_model(std::string name, bool has_random) {
  return {
      .name = std::move(name),
      .make = maker<Net>(),
      .make_inputs = images_and_classes,
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> { return {as<Net>(net).forward(in[0])}; },
      .loss = smoothed_classification,
      .has_random = has_random,
  };
}

}  // namespace

void add_vision_models(std::vector<ZooModel>& zoo) {
  zoo.push_back(image_model<Vit>("vit", /*has_random=*/true));
  zoo.push_back(image_model<Mixer>("mixer", /*has_random=*/false));
  zoo.push_back(image_model<ConvNext>("convnext", /*has_random=*/false));
}

}  // namespace smp::support
