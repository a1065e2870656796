// What bodies may return beside tensors, and what that becomes on every rank.
#include <gtest/gtest.h>

#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;
using Model = DistributedModel<SmallNet>;

struct Result {
  at::Tensor loss;
  int64_t num_rows = 0;
  std::vector<at::Tensor> hidden;
  std::optional<std::string> note;
};

struct Pair {
  at::Tensor first, second;
};

// Readable only through its Serialiser, with a tensor inside.
class Sealed {
 public:
  explicit Sealed(at::Tensor inside) : inside_(std::move(inside)) {}
  const at::Tensor& inside() const { return inside_; }

 private:
  at::Tensor inside_;
};

// Whose Serialiser reads less than it writes.
struct Half {
  int32_t value = 0;
};

}  // namespace

template <>
struct Serialiser<Half> {
  static void write(Writer& out, const Half& half) { out.put(half.value), out.put(half.value); }
  static Half read(Reader& in) { return {in.get<int32_t>()}; }
};
template <>
struct Fields<Result> {
  static auto of(auto& result) { return std::tie(result.loss, result.num_rows, result.hidden, result.note); }
};
template <>
struct Fields<Pair> {
  static auto of(auto& pair) { return std::tie(pair.first, pair.second); }
};
template <>
struct Serialiser<Sealed> {
  static void write(Writer& out, const Sealed& sealed) { out.put(sealed.inside()); }
  static Sealed read(Reader& in) { return Sealed(in.get<at::Tensor>()); }
};

namespace {

using step_internal::Returned;
static_assert(!Returned<at::Tensor>::kHasValues);
static_assert(!Returned<std::tuple<at::Tensor, std::pair<at::Tensor, Pair>>>::kHasValues);
static_assert(!Returned<std::vector<at::Tensor>>::kHasValues);
static_assert(Returned<std::tuple<at::Tensor, int>>::kHasValues);
static_assert(Returned<Result>::kHasValues);

at::Tensor part(const at::Tensor& tensor, int64_t m) { return tensor.narrow(0, 2 * m, 2).clone(); }

at::Tensor plain_net(const at::Tensor& data) {
  const at::NoGradGuard no_grad;
  return make_net()->forward(data);
}

/// Runs `body` on three ranks in two microbatches of 2 rows, three times, and gives every rank's result to `check`.
template <class Body, class Check>
void expect_everywhere(const Body& body, const Check& check) {
  run_smp_ranks(3, {.microbatches = 2}, [&] {
    Model model(make_net());
    auto step = smp::step([&](const at::Tensor& data) { return body(model, data); });
    const at::NoGradGuard no_grad;
    for (int s = 0; s < 3; ++s) check(step(rows(4, 8, 1)));
  });
}

struct EmptyBeside : torch::nn::Module {
  EmptyBeside() {
    set_partition(*first, 0);
    for (const auto& each : rest) set_partition(*each, 1);
  }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    const at::Tensor hidden = first(x), empty = hidden.detach().narrow(1, 0, 0) * 2;
    return {rest[2](torch::tanh(rest[1](torch::relu(rest[0](hidden))))), empty};
  }
  torch::nn::Linear first = register_module("first", torch::nn::Linear(8, 8));
  std::vector<torch::nn::Linear> rest = {register_module("b", torch::nn::Linear(8, 8)),
                                         register_module("c", torch::nn::Linear(8, 8)),
                                         register_module("d", torch::nn::Linear(8, 4))};
};

// Nothing is sent of them.
TEST(StepResults, MayBeEmptyWhereARankMakesNoOthers) {
  run_smp_ranks(2, {.microbatches = 2, .nonfinite = Nonfinite::kIgnore}, [] {
    DistributedModel<EmptyBeside> model(std::make_shared<EmptyBeside>());
    auto step = smp::step([&](at::Tensor data) {
      const std::vector<at::Tensor> made = model(data);
      const at::Tensor loss = made[0].square().mean();
      model.backward(loss);
      return std::vector<at::Tensor>{loss, made[1]};
    });
    for (int s = 0; s < 3; ++s) {
      const auto results = step(rows(8, 8, s));
      for (const at::Tensor& empty : results[1].outputs()) EXPECT_EQ(empty.sizes(), (std::vector<int64_t>{4, 0}));
    }
  });
}

TEST(StepResults, ValuesBecomeOneEntryPerMicrobatch) {
  int calls = 0;
  expect_everywhere(
      [&](Model& model, const at::Tensor& data) {
        const int call = calls++;
        return std::make_tuple(model(data), data.size(0), call % 2 == 0, "call " + std::to_string(call % 2),
                               std::vector<double>(static_cast<size_t>(call % 2), 0.5));
      },
      [](const std::tuple<StepOutput, std::vector<int64_t>, std::vector<bool>, std::vector<std::string>,
                          std::vector<std::vector<double>>>& result) {
        const auto& [output, sizes, flags, texts, lists] = result;
        expect_bit_equal(output[1], plain_net(part(rows(4, 8, 1), 1)), "output");
        EXPECT_EQ(sizes, (std::vector<int64_t>{2, 2}));
        EXPECT_EQ(flags, (std::vector<bool>{true, false}));
        EXPECT_EQ(texts, (std::vector<std::string>{"call 0", "call 1"}));
        EXPECT_EQ(lists, (std::vector<std::vector<double>>{{}, {0.5}}));
      });
}

TEST(StepResults, ValuesAloneNeedNoTensor) {
  expect_everywhere([](Model& model, const at::Tensor& data) { return model(data).size(1); },
                    [](const std::vector<int64_t>& sizes) { EXPECT_EQ(sizes, (std::vector<int64_t>{4, 4})); });
}

TEST(StepResults, NestedContainersKeepTheirStructure) {
  using Nested = std::map<std::string, std::vector<std::pair<at::Tensor, int>>>;
  expect_everywhere(
      [](Model& model, const at::Tensor& data) {
        return std::make_pair(Nested{{"a", {{model(data), 1}, {data * 2, 2}}}, {"b", {}}},
                              std::optional<std::array<at::Tensor, 2>>{{data, data + 1}});
      },
      [](const auto& result) {
        const auto& [map, arrays] = result;
        ASSERT_EQ(map.size(), 2u);
        EXPECT_TRUE(map.at("b").empty());
        const std::vector<std::pair<StepOutput, std::vector<int>>>& list = map.at("a");
        const at::Tensor data = rows(4, 8, 1);
        expect_bit_equal(list.at(0).first[1], plain_net(part(data, 1)), "output");
        expect_bit_equal(list.at(1).first.concat(), data * 2, "doubled");
        EXPECT_EQ(list.at(1).second, (std::vector<int>{2, 2}));
        ASSERT_TRUE(arrays.has_value());
        expect_bit_equal((*arrays)[1].concat(), data + 1, "an array in an optional");
      });
}

TEST(StepResults, StructsComeOnePerMicrobatchAndByMember) {
  expect_everywhere(
      [](Model& model, const at::Tensor& data) {
        const at::Tensor output = model(data);
        return Result{output.sum(), data.size(0), {output, data}, "seen"};
      },
      [](const StructOutput<Result>& result) {
        ASSERT_EQ(result.size(), 2);
        const at::Tensor data = rows(4, 8, 1);
        expect_bit_equal(result[1].loss, plain_net(part(data, 1)).sum(), "a struct's tensor");
        EXPECT_EQ(result[1].note, "seen");
        EXPECT_THROW(result[2], c10::IndexError);
        const StepOutput loss = result.of(&Result::loss);
        expect_bit_equal(loss.reduce_sum(), plain_net(part(data, 0)).sum() + plain_net(part(data, 1)).sum(), "reduced");
        EXPECT_EQ(result.of(&Result::num_rows), (std::vector<int64_t>{2, 2}));
        expect_bit_equal(result.of(&Result::hidden).at(1).concat(), data, "a member of members");
      });
}

TEST(StepResults, StructsOfTensorsAndSerialisableTypesWithTensors) {
  expect_everywhere(
      [](Model& model, const at::Tensor& data) { return std::make_tuple(Pair{model(data), data}, Sealed(data * 3)); },
      [](const std::tuple<StructOutput<Pair>, std::vector<Sealed>>& result) {
        const at::Tensor data = rows(4, 8, 1);
        expect_bit_equal(std::get<0>(result).of(&Pair::second).concat(), data, "a struct");
        expect_bit_equal(std::get<1>(result).at(1).inside(), part(data, 1) * 3, "a sealed tensor");
      });
}

TEST(StepResults, InputsConstantsAndPlainTensorsAreReturnedAsCopies) {
  const at::Tensor plain = rows(2, 2, 5), before = plain.clone();
  expect_everywhere(
      [&](Model& model, const at::Tensor& data) {
        return std::make_tuple(data, plain, plain.t(), torch::ones({2}), model.module()->first->bias);
      },
      [&](const auto& result) {
        expect_bit_equal(std::get<0>(result).concat(), rows(4, 8, 1), "an input");
        expect_bit_equal(std::get<1>(result)[1], before, "a plain tensor");
        expect_bit_equal(std::get<2>(result)[0], before.t().contiguous(), "a view of it");
        expect_bit_equal(std::get<3>(result)[0], torch::ones({2}), "a constant");
        expect_bit_equal(std::get<4>(result)[1], make_net()->first->bias.detach(), "a parameter");
        at::Tensor own = std::get<1>(result)[1];
        own.zero_();
      });
  expect_bit_equal(plain, before, "the tensor that was returned");
}

TEST(StepResults, TrainingWithValuesEqualsTheEagerLoop) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2, .microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    auto step = smp::step([&](at::Tensor data, at::Tensor target) {
      const at::Tensor loss = torch::mse_loss(model(data), target);
      model.backward(loss);
      return std::make_pair(loss, 100 * dp_rank() + data.size(0));
    });
    const auto [loss, counts] = step(rows(4, 8, 1), rows(4, 4, 2));
    expect_bit_equal(loss.outputs(), tests::eager_step(*twin, rows(4, 8, 1), rows(4, 4, 2), 2), "loss");
    tests::expect_twins(model, *twin, "one step");  // the mean of two equal gradients
    EXPECT_EQ(counts, (std::vector<int64_t>(2, 100 * dp_rank() + 2)));
  });
}

TEST(StepResults, OutputsAreDetached) {
  run_smp_ranks(2, {}, [] {
    Model model(make_net());
    auto step = smp::step([&](at::Tensor data) { return model(data); });
    const StepOutput output = step(rows(2, 8, 1)).detach();
    EXPECT_FALSE(output.concat().requires_grad());
    EXPECT_EQ(output.size(), 1);
  });
}

/// What every rank says to a body whose return differs from microbatch to microbatch; a good step goes through afterwards.
template <class Body>
void expect_refused(const Body& body, const std::string& text) {
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    Model model(make_net());
    int64_t calls = 0;
    auto step = smp::step([&](const at::Tensor& data) { return body(model(data), calls++); });
    const at::NoGradGuard no_grad;
    const std::string message = message_of<c10::ValueError>([&] { step(rows(4, 8, 1)); });
    EXPECT_TRUE(contains(message, text)) << "rank " << rank() << ": " << message;
    EXPECT_FALSE(model.partitioned());
    auto good = smp::step([&](at::Tensor x) { return std::make_pair(model(x), 1); });
    EXPECT_NO_THROW(good(rows(4, 8, 1)));
  });
}

TEST(StepResults, AnotherStructureInAnotherMicrobatchIsRefusedOnEveryRank) {
  const std::string text = "same sizes of containers, keys of maps and filled optionals";
  expect_refused(
      [](const at::Tensor& output, int64_t m) {
        using Lists = std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>;
        return m == 0 ? Lists{{output}, {}} : Lists{{}, {output}};
      },
      text);
  expect_refused([](const at::Tensor& output, int64_t m) { return std::map<int64_t, at::Tensor>{{m, output}}; }, text);
  expect_refused(
      [](const at::Tensor& output, int64_t m) {
        using Two = std::array<std::optional<at::Tensor>, 2>;
        return m == 0 ? Two{output, std::nullopt} : Two{std::nullopt, output};
      },
      text);
}

TEST(StepResults, ASerialiserThatReadsLessThanItWroteIsRefusedOnEveryRank) {
  const std::string text = "to read all that Serialiser::write wrote, got some left";
  expect_refused([](const at::Tensor&, int64_t) { return std::vector<Half>{{1}, {2}, {3}}; },
                 "step results: expected Serialiser::read of std::vector<");
  expect_refused([](const at::Tensor& output, int64_t) { return std::make_tuple(output, Half{1}); }, text);
}

}  // namespace
}  // namespace smp
