// two_towers, shared_weight_towers: parameters that are used at more than one place.
#include <torch/torch.h>

#include "tests/support/model_zoo.h"
#include "tests/support/model_zoo_parts.h"

namespace smp::support {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

struct Encoder : nn::Module {
  nn::Linear in{12, 20}, out{20, 8};
  nn::LayerNorm norm{nn::LayerNormOptions({20})};
  Encoder() {
    register_module("in", in);
    register_module("norm", norm);
    register_module("out", out);
  }
  at::Tensor forward(const at::Tensor& x) {
    return F::normalize(out(torch::gelu(norm(in(x)))), F::NormalizeFuncOptions().dim(1));
  }
};

// One encoder module called on both sides, with a learnt temperature as a parameter of its own.
struct TwoTowers : nn::Module {
  std::shared_ptr<Encoder> encoder = std::make_shared<Encoder>();
  at::Tensor log_scale;
  TwoTowers() {
    register_module("encoder", encoder);
    log_scale = register_parameter("log_scale", torch::full({}, 1.5));
  }
  // left, right: [batch, 12] -> similarities [batch, batch]
  at::Tensor forward(const at::Tensor& left, const at::Tensor& right) {
    return log_scale.exp() * torch::mm(encoder->forward(left), encoder->forward(right).t());
  }
};

ZooModel two_towers() {
  return {
      .name = "two_towers",
      .make = maker<TwoTowers>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        InputSource from(seed);
        auto left = from.normal({batch, 12});
        return {left, left + 0.5 * from.normal({batch, 12})};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        return {as<TwoTowers>(net).forward(in[0], in[1])};
      },
      // Contrastive: row i of one side belongs to row i of the other.
      .loss = [](const auto& out, const auto&) -> BodyResult {
        auto partner = torch::arange(out[0].size(0), torch::dtype(torch::kLong).device(out[0].device()));
        return {(F::cross_entropy(out[0], partner) + F::cross_entropy(out[0].t(), partner)) / 2,
                {out[0].argmax(1).eq(partner).sum()}};
      },
      .has_tied_weights = true,
      .rows_are_independent = false,
  };
}

// A layer whose weight was made elsewhere.
struct SharedLinear : nn::Module {
  at::Tensor weight, bias;
  explicit SharedLinear(at::Tensor shared) {
    weight = register_parameter("weight", std::move(shared));
    bias = register_parameter("bias", torch::zeros({weight.size(0)}));
  }
  at::Tensor forward(const at::Tensor& x) { return F::linear(x, weight, bias); }
};

// Two towers of different depth whose first layers own one weight tensor under two names.
struct SharedWeightTowers : nn::Module {
  std::shared_ptr<SharedLinear> query_in, document_in;
  nn::Linear query_out{16, 8}, document_mid{16, 16}, document_out{16, 8};
  SharedWeightTowers() {
    auto weight = torch::empty({16, 12});
    nn::init::kaiming_uniform_(weight, std::sqrt(5.0));
    query_in = register_module("query_in", std::make_shared<SharedLinear>(weight));
    register_module("query_out", query_out);
    document_in = register_module("document_in", std::make_shared<SharedLinear>(weight));
    register_module("document_mid", document_mid);
    register_module("document_out", document_out);
  }
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& query, const at::Tensor& document) {
    auto q = query_out(torch::relu(query_in->forward(query)));
    auto d = torch::relu(document_mid(torch::relu(document_in->forward(document))));
    return {q, document_out(d)};
  }
};

ZooModel shared_weight_towers() {
  return {
      .name = "shared_weight_towers",
      .make = maker<SharedWeightTowers>(),
      .make_inputs = [](int64_t batch, uint64_t seed) -> std::vector<at::Tensor> {
        InputSource from(seed);
        auto match = 2.0 * from.integers(2, {batch}).to(torch::kFloat) - 1.0;
        return {from.normal({batch, 12}), from.normal({batch, 12}), match};
      },
      .forward = [](nn::Module& net, const auto& in) -> std::vector<at::Tensor> {
        auto [query, document] = as<SharedWeightTowers>(net).forward(in[0], in[1]);
        return {query, document};
      },
      .loss = [](const auto& out, const auto& in) -> BodyResult {
        return {torch::cosine_embedding_loss(out[0], out[1], in[2], 0.1), {torch::cosine_similarity(out[0], out[1])}};
      },
      .has_tied_weights = true,
  };
}

}  // namespace

void add_tower_models(std::vector<ZooModel>& zoo) {
  zoo.push_back(two_towers());
  zoo.push_back(shared_weight_towers());
}

}  // namespace smp::support
