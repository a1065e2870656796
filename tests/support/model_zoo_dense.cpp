// mlp, vae, tuple_output, several_inputs: models of linear layers.
#include <torch/torch.h>

#include "tests/support/model_zoo.h"
#include "tests/support/model_zoo_parts.h"

namespace smp::support {
namespace {

namespace nn = torch::nn;

struct Mlp : nn::Module {
  nn::Sequential layers{nn::Linear(16, 32), nn::ReLU(), nn::Linear(32, 32), nn::GELU(),
                        nn::Linear(32, 24), nn::Tanh(), nn::Linear(24, 10)};
  Mlp() { register_module("layers", layers); }
  at::Tensor forward(const at::Tensor& x) { return torch::log_softmax(layers->forward(x), 1); }
};

ZooModel mlp() {
  return {
      .name = "mlp",
      .make = maker<Mlp>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        InputSource from(seed);
        return {from.normal({batch, 16}), from.integers(10, {batch})};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> { return {as<Mlp>(net).forward(in[0])}; },
      .loss = [](const auto& out, const auto& in) -> BodyResult {
        return {torch::nll_loss(out[0], in[1]), {out[0], out[0].argmax(1).eq(in[1]).sum()}};
      },
  };
}

// Variational auto-encoder: the sample is drawn by an operator without parameters in the middle of the model.
struct Vae : nn::Module {
  nn::Linear encode{24, 16}, mean{16, 6}, log_variance{16, 6}, decode1{6, 16}, decode2{16, 24};
  Vae() {
    register_module("encode", encode);
    register_module("mean", mean);
    register_module("log_variance", log_variance);
    register_module("decode1", decode1);
    register_module("decode2", decode2);
  }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    auto hidden = torch::relu(encode(x));
    auto mu = mean(hidden);
    auto log_var = log_variance(hidden);
    auto deviation = torch::exp(0.5 * log_var);
    auto z = is_training() ? mu + deviation * torch::randn_like(deviation) : mu;
    return {torch::sigmoid(decode2(torch::relu(decode1(z)))), mu, log_var};
  }
};

ZooModel vae() {
  return {
      .name = "vae",
      .make = maker<Vae>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        return {InputSource(seed).uniform({batch, 24})};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        auto [image, mu, log_var] = as<Vae>(net).forward(in[0]);
        return {image, mu, log_var};
      },
      .loss = [](const auto& out, const auto& in) -> BodyResult {
        auto reconstruction = torch::binary_cross_entropy(out[0], in[0]);
        auto divergence = -0.5 * torch::mean(1 + out[2] - out[1].pow(2) - out[2].exp());
        return {reconstruction + 0.1 * divergence, {reconstruction, divergence}};
      },
      .has_random = true,
  };
}

// A class head and a box head on one trunk, returned as a tuple.
struct TwoHeads : nn::Module {
  nn::Linear trunk1{12, 24}, trunk2{24, 24}, classes{24, 5}, box{24, 4};
  nn::LayerNorm norm{nn::LayerNormOptions({24})};
  TwoHeads() {
    register_module("trunk1", trunk1);
    register_module("trunk2", trunk2);
    register_module("norm", norm);
    register_module("classes", classes);
    register_module("box", box);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    auto hidden = torch::silu(trunk1(x));
    hidden = norm(hidden + torch::silu(trunk2(hidden)));
    return {classes(hidden), torch::sigmoid(box(hidden))};
  }
};

ZooModel tuple_output() {
  return {
      .name = "tuple_output",
      .make = maker<TwoHeads>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        InputSource from(seed);
        return {from.normal({batch, 12}), from.integers(5, {batch}), from.uniform({batch, 4})};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        auto [scores, box] = as<TwoHeads>(net).forward(in[0]);
        return {scores, box};
      },
      .loss = [](const auto& out, const auto& in) -> BodyResult {
        auto class_loss = torch::nn::functional::cross_entropy(out[0], in[1]);
        auto box_loss = torch::nn::functional::smooth_l1_loss(out[1], in[2]);
        return {class_loss + 5.0 * box_loss, {out[1], class_loss, box_loss}};
      },
  };
}

// A recommender: identifiers, features and a boolean mask; the mask is used at the start and at the end.
struct Recommender : nn::Module {
  nn::Embedding items{30, 12};
  nn::Linear features{6, 12}, mix1{24, 24}, mix2{24, 12}, score{12, 1};
  nn::Dropout dropout{0.2};
  Recommender() {
    register_module("items", items);
    register_module("features", features);
    register_module("mix1", mix1);
    register_module("mix2", mix2);
    register_module("score", score);
    register_module("dropout", dropout);
  }
  // ids: [batch, slots]; profile: [batch, 6]; present: [batch, slots], bool -> scores [batch, slots].
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& profile, const at::Tensor& present) {
    auto item = items(ids).masked_fill(present.logical_not().unsqueeze(-1), 0.0);
    auto user = features(profile).unsqueeze(1).expand_as(item);
    auto hidden = dropout(torch::leaky_relu(mix1(torch::cat({item, user}, 2)), 0.1));
    auto scores = score(torch::relu(mix2(hidden)) + item).squeeze(-1);
    return torch::where(present, scores, torch::full_like(scores, -4.0));
  }
};

ZooModel several_inputs() {
  return {
      .name = "several_inputs",
      .make = maker<Recommender>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        InputSource from(seed);
        return {from.integers(30, {batch, 7}), from.normal({batch, 6}), from.uniform({batch, 7}).lt(0.8),
                from.integers(2, {batch, 7}).to(torch::kFloat)};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        return {as<Recommender>(net).forward(in[0], in[1], in[2])};
      },
      .loss = [](const auto& out, const auto& in) -> BodyResult {
        return {torch::binary_cross_entropy_with_logits(out[0], in[3]), {out[0].gt(0.0)}};
      },
      .has_random = true,
  };
}

}  // namespace

void add_dense_models(std::vector<ZooModel>& zoo) {
  zoo.push_back(mlp());
  zoo.push_back(vae());
  zoo.push_back(tuple_output());
  zoo.push_back(several_inputs());
}

}  // namespace smp::support
