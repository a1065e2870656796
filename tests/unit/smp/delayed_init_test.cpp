// Values made later against values made at once, bit for bit: modules by themselves, and what else constructors do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

#include "runtime/libtorch/unmade.h"
#include "smp/smp.h"
#include "tests/support/bits.h"

namespace smp {
namespace {

namespace nn = torch::nn;
using ModulePtr = std::shared_ptr<nn::Module>;
using Make = std::function<ModulePtr()>;

struct Built {
  ModulePtr module;
  at::Tensor next_numbers;  // that the program draws afterwards
};

Built build(const Make& make, bool delayed) {
  torch::manual_seed(3);
  Built built;
  {
    const DelayParamInitialization delay(delayed);
    built.module = make();
  }
  built.next_numbers = torch::randn({5});
  return built;
}

std::vector<at::Tensor> tensors_of(const nn::Module& module) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

void expect_twins(const std::string& what, const Make& make) {
  SCOPED_TRACE(what);
  const Built eager = build(make, false), delayed = build(make, true);
  EXPECT_TRUE(eager.next_numbers.equal(delayed.next_numbers));
  const auto before = tensors_of(*delayed.module);
  int64_t num_unmade = 0;
  for (const at::Tensor& tensor : before) num_unmade += runtime::is_unmade(tensor);
  EXPECT_EQ(num_unmade > 0, !before.empty());
  initialize_parameters(*delayed.module);
  EXPECT_TRUE(torch::randn({5}).equal((torch::manual_seed(3), make(), torch::randn({5}), torch::randn({5}))))
      << "generator moved";
  const auto expected = eager.module->named_parameters(), got = delayed.module->named_parameters();
  ASSERT_EQ(expected.size(), got.size());
  for (const auto& item : expected) {
    EXPECT_EQ(item.value().requires_grad(), got[item.key()].requires_grad()) << item.key();
    EXPECT_EQ(item.value().strides(), got[item.key()].strides()) << item.key();
    EXPECT_TRUE(got[item.key()].is_leaf() && got[item.key()].is_cpu()) << item.key();
    support::expect_bit_equal(got[item.key()], item.value(), item.key());
  }
  for (const auto& item : eager.module->named_buffers()) {
    support::expect_bit_equal(delayed.module->named_buffers()[item.key()], item.value(), item.key());
  }
}

template <class Holder, class... Args>
Make of(Args... args) {
  return [=] { return Holder(args...).ptr(); };
}

TEST(DelayedInitialisation, GivesTheModulesOfLibTorchTheirEagerValues) {
  expect_twins("Linear", of<nn::Linear>(70, 50));
  expect_twins("Linear without bias", of<nn::Linear>(nn::LinearOptions(7, 3).bias(false)));
  expect_twins("Bilinear", of<nn::Bilinear>(4, 5, 6));
  expect_twins("Conv1d", of<nn::Conv1d>(3, 4, 5));
  expect_twins("Conv2d", of<nn::Conv2d>(nn::Conv2dOptions(4, 8, 3).groups(2)));
  expect_twins("Conv3d", of<nn::Conv3d>(2, 3, 3));
  expect_twins("ConvTranspose2d", of<nn::ConvTranspose2d>(3, 4, 3));
  expect_twins("BatchNorm2d", of<nn::BatchNorm2d>(8));
  expect_twins("InstanceNorm1d",
               of<nn::InstanceNorm1d>(nn::InstanceNorm1dOptions(8).affine(true).track_running_stats(true)));
  expect_twins("GroupNorm", of<nn::GroupNorm>(2, 8));
  expect_twins("LayerNorm", of<nn::LayerNorm>(nn::LayerNormOptions({3, 8})));
  expect_twins("Embedding", of<nn::Embedding>(30, 8));
  expect_twins("Embedding with padding", of<nn::Embedding>(nn::EmbeddingOptions(30, 8).padding_idx(4)));
  expect_twins("EmbeddingBag", of<nn::EmbeddingBag>(30, 8));
  expect_twins("RNN", of<nn::RNN>(nn::RNNOptions(5, 7).num_layers(2)));
  expect_twins("LSTM", of<nn::LSTM>(nn::LSTMOptions(5, 7).num_layers(2).bidirectional(true)));
  expect_twins("GRU", of<nn::GRU>(nn::GRUOptions(5, 7).num_layers(2)));
  expect_twins("LSTMCell", of<nn::LSTMCell>(5, 7));
  expect_twins("PReLU", of<nn::PReLU>());
  expect_twins("MultiheadAttention", of<nn::MultiheadAttention>(8, 2));
  expect_twins("MultiheadAttention with more",
               of<nn::MultiheadAttention>(nn::MultiheadAttentionOptions(8, 2).add_bias_kv(true).kdim(4).vdim(6)));
  expect_twins("Transformer", of<nn::Transformer>(nn::TransformerOptions(16, 2, 2, 2)));
  expect_twins("TransformerEncoder", [] {
    return nn::TransformerEncoder(nn::TransformerEncoderOptions(nn::TransformerEncoderLayerOptions(16, 2), 3)).ptr();
  });
  expect_twins("AdaptiveLogSoftmax",
               [] { return nn::AdaptiveLogSoftmaxWithLoss(nn::AdaptiveLogSoftmaxWithLossOptions(64, 20, {5, 10})).ptr(); });
  expect_twins("larger than a draw's part", of<nn::Linear>(700, 301));
}

// Everything in nn::init, and the operators that constructors of users call.
struct Initialised : nn::Module {
  Initialised() {
    namespace init = nn::init;
    const auto add = [&](const char* name, at::IntArrayRef sizes) { return register_parameter(name, torch::empty(sizes)); };
    init::uniform_(add("uniform", {3, 40}), -2, 1);
    init::normal_(add("normal", {3, 7}), 1, 3);
    init::normal_(add("few", {5}));
    init::constant_(add("constant", {4}), 2.5);
    init::ones_(add("ones", {4}));
    init::zeros_(add("zeros", {4}));
    init::eye_(add("eye", {4, 3}));
    init::dirac_(add("dirac", {4, 3, 5}));
    init::orthogonal_(add("orthogonal", {6, 4}));
    init::sparse_(add("sparse", {6, 4}), 0.4);
    init::xavier_uniform_(add("xavier_uniform", {6, 4}));
    init::xavier_normal_(add("xavier_normal", {6, 4}));
    init::kaiming_uniform_(add("kaiming_uniform", {6, 4}));
    init::kaiming_normal_(add("kaiming_normal", {6, 4}));
    register_parameter("random", torch::randn({20, 30}) * 0.02);
    register_parameter("truncated", torch::rand({20, 30}).mul_(2).sub_(1).mul_(0.9).erfinv_().clamp_(-2, 2));
    register_parameter("transposed", torch::rand({20, 30}).t());
    register_parameter("normal_apart", torch::empty({20, 30}).t().normal_());
    register_parameter("doubles", torch::rand({20}, torch::kDouble));
    register_parameter("half", torch::randn({20}).to(torch::kHalf));
    register_buffer("permutation", torch::randperm(30));
    register_buffer("integers", torch::randint(9, {40}));
    register_buffer("positions", torch::arange(30));
    register_buffer("steps", torch::linspace(0, 1, 7));
    register_buffer("literal", torch::tensor({1.0, 2.0, 3.0}));
    register_buffer("vector", torch::tensor(std::vector<float>{1, 2, 3}));
    register_buffer("count", torch::tensor(5));
    register_buffer("triangle", torch::triu(torch::full({6, 6}, -1e9), 1));
    register_buffer("draws", torch::bernoulli(torch::full({20}, 0.3)));
    register_buffer("chosen", torch::multinomial(torch::rand({10}), 4));
    register_buffer("exponential", torch::empty({20}).exponential_());
    register_buffer("dropped", torch::dropout(torch::ones({50}), 0.5, true));
    auto table = torch::zeros({6, 8});
    table.index_put_({torch::indexing::Slice(), torch::indexing::Slice(0, torch::indexing::None, 2)}, torch::rand({6, 4}));
    table[2].fill_(7);
    table.select(1, 3).copy_(torch::from_blob(numbers, {6}, torch::kFloat));
    register_buffer("table", table.unsqueeze(0));
    auto shared = torch::rand({8, 4});
    register_parameter("upper", shared.narrow(0, 0, 4).clone());
    register_parameter("lower", shared.narrow(0, 4, 4).contiguous() + 1);
    register_parameter("twice", torch::rand({4}));
    nn::init::normal_(named_parameters()["twice"]);
    register_buffer("scaled", table * torch::rand({1}).item<float>());
    named_parameters()["few"].set_requires_grad(false);
    named_parameters()["ones"].set_data(torch::rand({4}));
    register_buffer("rows", torch::rand({6, 4}).index({torch::tensor({3, 1, 1})}));
    const at::NoGradGuard no_grad;
    register_parameter("other_memory", torch::zeros({2, 2})).set_(torch::rand({5}));
    if (torch::rand({1}).item<double>() < 2 && table.equal(table.clone())) register_buffer("taken", torch::rand({3}));
  }
  float numbers[6] = {1, 2, 3, 4, 5, 6};
};

TEST(DelayedInitialisation, FollowsWhatConstructorsOfUsersDo) {
  expect_twins("Initialised", [] { return std::make_shared<Initialised>(); });
  expect_twins("in double", [] {
    torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
    auto module = std::make_shared<Initialised>();
    torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
    return module;
  });
  expect_twins("converted", [] {
    auto module = std::make_shared<Initialised>();
    module->to(torch::kDouble);
    return module;
  });
  expect_twins("cloned", [] { return nn::Linear(4, 4)->clone(); });
  expect_twins("with a generator of its own", [] {
    at::Generator own = at::detail::createCPUGenerator(9);
    auto linear = nn::Linear(30, 40);
    torch::NoGradGuard no_grad;
    linear->weight.normal_(0, 1, own);
    linear->bias.uniform_(0, 1, own);
    return linear.ptr();
  });
  expect_twins("seeded in the middle", [] {
    nn::Sequential net(nn::Linear(30, 40));
    torch::manual_seed(77);
    net->push_back(nn::Linear(30, 40));
    return net.ptr();
  });
}

}  // namespace
}  // namespace smp
