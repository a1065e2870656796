// convnet, resnet, unet: images, batch norm, long skips, writes in place.
#include <torch/torch.h>

#include "tests/support/model_zoo.h"
#include "tests/support/model_zoo_parts.h"

namespace smp::support {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

nn::Conv2d conv3x3(int64_t in, int64_t out, int64_t stride = 1) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false));
}

BodyResult classification(const std::vector<at::Tensor>& out, const std::vector<at::Tensor>& in) {
  return {F::cross_entropy(out[0], in[1]), {out[0], out[0].argmax(1).eq(in[1]).sum()}};
}

struct ConvNet : nn::Module {
  nn::Conv2d conv1{nn::Conv2dOptions(3, 8, 3).padding(1)};
  nn::BatchNorm2d norm1{8};
  nn::Conv2d conv2{nn::Conv2dOptions(8, 12, 3)};
  nn::BatchNorm2d norm2{12};
  nn::Dropout2d dropout1{0.2};
  nn::Linear linear1{12 * 2 * 2, 24};
  nn::Dropout dropout2{0.3};
  nn::Linear linear2{24, 6};
  ConvNet() {
    register_module("conv1", conv1);
    register_module("norm1", norm1);
    register_module("conv2", conv2);
    register_module("norm2", norm2);
    register_module("dropout1", dropout1);
    register_module("linear1", linear1);
    register_module("dropout2", dropout2);
    register_module("linear2", linear2);
  }
  at::Tensor forward(at::Tensor x) {
    x = torch::max_pool2d(torch::relu(norm1(conv1(x))), 2);
    x = dropout1(torch::relu(norm2(conv2(x))));
    x = x.view({x.size(0), -1});
    return linear2(dropout2(torch::relu(linear1(x))));
  }
};

ZooModel convnet() {
  return {
      .name = "convnet",
      .make = maker<ConvNet>(),
      .make_inputs = images_and_classes,
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        return {as<ConvNet>(net).forward(in[0])};
      },
      .loss = classification,
      .has_random = true,
      .rows_are_independent = false,
  };
}

// He et al., CVPR 2016, figure 5 left, with the activation in place as torchvision has it.
struct BasicBlock : nn::Module {
  nn::Conv2d conv1{nullptr}, conv2{nullptr}, shortcut{nullptr};
  nn::BatchNorm2d norm1{nullptr}, norm2{nullptr}, shortcut_norm{nullptr};
  BasicBlock(int64_t in, int64_t out, int64_t stride) {
    conv1 = register_module("conv1", conv3x3(in, out, stride));
    norm1 = register_module("norm1", nn::BatchNorm2d(out));
    conv2 = register_module("conv2", conv3x3(out, out));
    norm2 = register_module("norm2", nn::BatchNorm2d(out));
    if (in == out) return;
    shortcut = register_module("shortcut", nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)));
    shortcut_norm = register_module("shortcut_norm", nn::BatchNorm2d(out));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto identity = shortcut.is_empty() ? x : shortcut_norm(shortcut(x));
    auto out = norm1(conv1(x)).relu_();
    out = norm2(conv2(out));
    out += identity;
    return out.relu_();
  }
};

struct ResNet : nn::Module {
  nn::Conv2d stem{conv3x3(3, 6)};
  nn::BatchNorm2d stem_norm{6};
  std::vector<std::shared_ptr<BasicBlock>> blocks;
  nn::Linear head{10, 6};
  ResNet() {
    register_module("stem", stem);
    register_module("stem_norm", stem_norm);
    blocks = {std::make_shared<BasicBlock>(6, 6, 1), std::make_shared<BasicBlock>(6, 10, 2),
              std::make_shared<BasicBlock>(10, 10, 1)};
    for (size_t i = 0; i < blocks.size(); ++i) {
      register_module("block" + std::to_string(i), blocks[i]);
    }
    register_module("head", head);
  }
  at::Tensor forward(at::Tensor x) {
    x = stem_norm(stem(x));
    torch::relu_(x);
    for (auto& block : blocks) x = block->forward(x);
    return head(torch::adaptive_avg_pool2d(x, {1, 1}).flatten(1));
  }
};

ZooModel resnet() {
  return {
      .name = "resnet",
      .make = maker<ResNet>(),
      .make_inputs = images_and_classes,
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> { return {as<ResNet>(net).forward(in[0])}; },
      .loss = classification,
      .rows_are_independent = false,
  };
}

// Ronneberger et al., MICCAI 2015: what the way down made is used again on the way up, the first longest.
struct UNet : nn::Module {
  nn::Conv2d down0{conv3x3(1, 4)}, down1{conv3x3(4, 8)}, bottom{conv3x3(8, 12)};
  nn::GroupNorm norm0{2, 4}, norm1{2, 8};
  nn::ConvTranspose2d grow{nn::ConvTranspose2dOptions(12, 8, 2).stride(2)};
  nn::Conv2d up1{conv3x3(16, 8)}, up0{conv3x3(12, 4)};
  nn::Conv2d head{nn::Conv2dOptions(4, 1, 1)};
  UNet() {
    register_module("down0", down0);
    register_module("norm0", norm0);
    register_module("down1", down1);
    register_module("norm1", norm1);
    register_module("bottom", bottom);
    register_module("grow", grow);
    register_module("up1", up1);
    register_module("up0", up0);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto skip0 = torch::relu(norm0(down0(x)));
    auto skip1 = torch::relu(norm1(down1(torch::max_pool2d(skip0, 2))));
    auto low = torch::relu(bottom(torch::avg_pool2d(skip1, 2)));
    auto middle = torch::relu(up1(torch::cat({grow(low), skip1}, 1)));
    auto high = F::interpolate(
        middle,
        F::InterpolateFuncOptions().scale_factor(std::vector<double>{2.0, 2.0}).mode(torch::kBilinear).align_corners(false));
    return head(torch::relu(up0(torch::cat({high, skip0}, 1))));
  }
};

ZooModel unet() {
  return {
      .name = "unet",
      .make = maker<UNet>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        auto image = InputSource(seed).normal({batch, 1, 8, 8});
        return {image, image.gt(0.5).to(torch::kFloat)};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> { return {as<UNet>(net).forward(in[0])}; },
      .loss = [](const auto& out, const auto& in) -> BodyResult {
        auto mask = torch::sigmoid(out[0]);
        auto overlap = (2 * (mask * in[1]).sum({1, 2, 3}) + 1) / (mask.sum({1, 2, 3}) + in[1].sum({1, 2, 3}) + 1);
        return {torch::binary_cross_entropy_with_logits(out[0], in[1]) + (1 - overlap).mean(), {mask}};
      },
  };
}

}  // namespace

void add_conv_models(std::vector<ZooModel>& zoo) {
  zoo.push_back(convnet());
  zoo.push_back(resnet());
  zoo.push_back(unet());
}

}  // namespace smp::support
