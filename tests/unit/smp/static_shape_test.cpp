// Operators whose sizes look as if data decided them, and do not: as without smp, on tapes and under autograd.
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

using support::contains;
using support::message_of;
using tests::Loop;
using tests::rows;
using tests::run_smp_ranks;
using torch::indexing::None;
using torch::indexing::Slice;

struct FormNet;

struct Form {
  std::string name;
  std::function<at::Tensor(FormNet& net, const at::Tensor& hidden)> of;  // hidden: [2, 8]
};

void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

/// What the form makes of the first layer's output joins that of the last one.
struct FormNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor hidden = torch::tanh(first(x));
    const at::Tensor made = form->of(*this, hidden).to(at::kFloat);
    return third(torch::relu(second(hidden))) * (1 + made.mean()) + made.sum();
  }
  const Form* form = nullptr;
  at::Tensor batch_sizes;  // no part of the module for smp
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
  torch::nn::Linear third = register_module("third", torch::nn::Linear(8, 4));
  torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 3).num_layers(2)));
  torch::nn::GRU gru = register_module("gru", torch::nn::GRU(torch::nn::GRUOptions(4, 3).bidirectional(true)));
};

const at::Tensor kColumns = torch::tensor({5, 0, -1, 5});
const at::Tensor kBatchSizes = torch::tensor({2, 1, 1});
const at::Tensor kRepeats = torch::tensor({3, 1});

std::vector<Form> forms() {
  return {
      {"IndexOfColumns", [](FormNet&, const at::Tensor& h) { return h.index({Slice(), kColumns}); }},
      {"IndexOfPairs", [](FormNet&, const at::Tensor& h) { return h.index({kColumns.remainder(2), kColumns}); }},
      {"IndexWithANewDimension",
       [](FormNet&, const at::Tensor& h) { return h.index({None, Slice(), kColumns.to(at::kInt)}); }},
      {"IndexByWhatTheBodyMakes", [](FormNet&, const at::Tensor& h) { return h.index({h.detach().argmax(0)}); }},
      {"IndexOfAWeight", [](FormNet& net, const at::Tensor& h) { return net.second->weight.index({kColumns}) + h[0]; }},
      {"IndexPutByAMask", [](FormNet&, const at::Tensor& h) { return h.index_put({h > 0}, torch::tensor(0.5)); }},
      {"CatWithAnEmptyTensor",
       [](FormNet&, const at::Tensor& h) { return torch::cat({torch::empty({0}), h, torch::empty({0, 8})}); }},
      {"CatThatGrows",
       [](FormNet&, const at::Tensor& h) {
         at::Tensor all = torch::empty({0, 8});
         for (int i = 0; i < 3; ++i) all = torch::cat({all, h * i});
         return all;
       }},
      {"CatWithNoRows", [](FormNet&, const at::Tensor& h) { return torch::cat({h.narrow(0, 1, 0), h}); }},
      {"Cov", [](FormNet&, const at::Tensor& h) { return torch::cov(h); }},
      {"CovOfOneRow", [](FormNet&, const at::Tensor& h) { return torch::cov(h[0], 0); }},
      {"CovWithWeights",
       [](FormNet&, const at::Tensor& h) { return torch::cov(h.t(), 0, torch::tensor({2, 1}), h.detach().abs().mean(1)); }},
      {"Corrcoef", [](FormNet&, const at::Tensor& h) { return torch::corrcoef(h); }},
      {"PackedLstm",
       [](FormNet& net, const at::Tensor& h) {
         const at::Tensor state = torch::zeros({2, 2, 3});
         return std::get<0>(
             at::lstm(h.reshape({4, 4}), kBatchSizes, {state, state}, net.lstm->all_weights(), true, 2, 0.0, true, false));
       }},
      {"PackedGru",
       [](FormNet& net, const at::Tensor& h) {
         return std::get<0>(at::gru(h.reshape({4, 4}), kBatchSizes, torch::zeros({2, 2, 3}), net.gru->all_weights(), true, 1,
                                    0.0, true, true));
       }},
      {"RepeatInterleave", [](FormNet&, const at::Tensor& h) { return torch::repeat_interleave(h, kRepeats, 0, 4); }},
      {"RepeatInterleaveOfRepeats",
       [](FormNet&, const at::Tensor& h) {
         return h.index_select(0, torch::repeat_interleave(kRepeats, std::optional<int64_t>(4)));
       }},
      {"OneHot", [](FormNet&, const at::Tensor& h) { return torch::one_hot(h.detach().argmax(1), 8) * h; }},
      {"NonzeroStatic", [](FormNet&, const at::Tensor& h) { return at::nonzero_static(h.detach() > 0, 16, 0); }},
  };
}

using Case = std::tuple<int, StageKind, Form>;
class StaticShape : public testing::TestWithParam<Case> {};

std::string name_of(const testing::TestParamInfo<Case>& test) {
  const auto& [ranks, stage, form] = test.param;
  return form.name + std::to_string(ranks) + (stage == StageKind::kTape ? "Tape" : "Autograd");
}

std::shared_ptr<FormNet> net_of(const Form& form) {
  auto net = tests::make_filled<FormNet>();
  net->form = &form;
  return net;
}

TEST_P(StaticShape, IsNotRefused) {
  const auto& [ranks, stage, form] = GetParam();
  Loop<FormNet> loop{.ranks = ranks, .steps = 3, .config = {.microbatches = 2, .stage = stage}};
  loop.make = [&form = form] { return net_of(form); };
  tests::expect_as_in_a_loop<FormNet>(loop, tests::train_once);
}

INSTANTIATE_TEST_SUITE_P(Forms, StaticShape,
                         testing::Combine(testing::Values(1, 2, 3), testing::Values(StageKind::kTape, StageKind::kAutograd),
                                          testing::ValuesIn(forms())),
                         name_of);

/// The batch sizes of a packed sequence change with the step, and so does what runs at once.
TEST(StaticShape, BatchSizesMayChange) {
  const Form packed{"", [](FormNet& net, const at::Tensor& h) {
                      return std::get<0>(at::gru(h.reshape({4, 4}), net.batch_sizes, torch::zeros({2, 2, 3}),
                                                 net.gru->all_weights(), true, 1, 0.0, true, true));
                    }};
  Loop<FormNet> loop{.ranks = 2, .config = {.microbatches = 1}, .make = [&] { return net_of(packed); }};
  loop.before_step = [](FormNet& net, int step) {
    net.batch_sizes = step < 2 ? torch::tensor({2, 1, 1}) : torch::tensor({2, 2, 0}).narrow(0, 0, 2).clone();
  };
  tests::expect_as_in_a_loop<FormNet>(loop, tests::train_once);
}

struct LateNet : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return second(first(x)) * scale; }
  at::Tensor scale = register_parameter("scale", torch::ones({8}));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
};

TEST(Refusal, NamesWhatCameAfterTheModelWasWrapped) {
  run_smp_ranks(2, {.microbatches = 1}, [] {
    const auto net = std::make_shared<LateNet>();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return model(data).detach(); });
    const auto refusal = [&] { return message_of([&] { step(rows(4, 8, 1)); }); };
    net->first = net->replace_module("first", torch::nn::Linear(8, 8));
    EXPECT_TRUE(contains(refusal(), "when it was wrapped") && contains(refusal(), "before DistributedModel is made"))
        << refusal();
  });
}

TEST(Refusal, NamesTheRootModule) {
  run_smp_ranks(1, {.microbatches = 1}, [] {
    const auto net = std::make_shared<LateNet>();
    DistributedModel model(net);
    auto step = smp::step([&](at::Tensor data) { return (data * net->scale).nonzero(); });
    const std::string text = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "aten::nonzero, in or after the root module")) << text;
  });
}

TEST(Refusal, OfACachedMaskSaysWhereToMakeIt) {
  run_smp_ranks(1, {.microbatches = 2}, [] {
    DistributedModel model(tests::make_net());
    at::Tensor mask;
    auto step = smp::step([&](at::Tensor data) {
      if (!mask.defined()) mask = torch::ones({2, 8}).triu();
      return model(data * mask).detach();
    });
    const std::string text = message_of([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(text, "ghost of an earlier run") && contains(text, "make it in the constructor")) << text;
  });
}

}  // namespace
}  // namespace smp
