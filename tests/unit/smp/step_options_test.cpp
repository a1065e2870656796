// Step options, structs of the program and objects that cut themselves, as step arguments.
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

struct Batch {
  at::Tensor data;
  std::vector<at::Tensor> targets;
  double scale = 1;
  std::string name = "unnamed";  // none of its Fields
};

template <class T>
struct Box {  // a template of tensors
  T content;
};

// As a loader of the program might hand out: it knows how to cut itself.
struct Rows {
  at::Tensor data;
  int64_t* num_slices = nullptr;
  Rows smp_slice(int64_t num_microbatches, int64_t microbatch, int64_t axis) const {
    if (num_slices != nullptr) ++*num_slices;
    return {data.chunk(num_microbatches, axis)[static_cast<size_t>(microbatch)]};
  }
};

// Unequal parts, and no tensors that smp knows of.
struct Secret {
  at::Tensor data;
  at::Tensor smp_slice(int64_t, int64_t microbatch, int64_t) const {
    return microbatch == 0 ? data.narrow(0, 0, 1) : data.narrow(0, 1, data.size(0) - 1);
  }
};

struct Uneven {
  at::Tensor data;
  std::vector<at::Tensor> smp_slice(int64_t, int64_t microbatch, int64_t) const {
    return std::vector<at::Tensor>(static_cast<size_t>(1 + microbatch), data);
  }
};

struct Broken {
  at::Tensor smp_slice(int64_t, int64_t, int64_t) const { throw std::runtime_error("the page is torn"); }
};

}  // namespace

template <>
struct Fields<Batch> {
  static auto of(auto& batch) { return std::tie(batch.data, batch.targets, batch.scale); }
};
template <class T>
struct Fields<Box<T>> {
  static auto of(auto& box) { return std::tie(box.content); }
};
template <>
struct Fields<Rows> {
  static auto of(auto& own) { return std::tie(own.data); }
};

namespace {

static_assert(step_internal::holds_tensors<Batch>);
static_assert(step_internal::holds_tensors<const Box<at::Tensor>>);
static_assert(!step_internal::holds_tensors<Box<int>>);

/// Runs a step without a backward on two ranks, twice, and returns its results on the last of them.
template <class Body, class... Args>
std::vector<at::Tensor> run(const Body& body, const StepOptions& options, Args&&... args) {
  std::vector<at::Tensor> outputs;
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    Model model(make_net());
    auto step = smp::step([&](auto&&... each) { return body(model, each...); }, options);
    const at::NoGradGuard no_grad;
    step(args...);
    const StepOutput output = step(args...);
    if (rank() == 1) outputs = output.outputs();
  });
  return outputs;
}

at::Tensor net_of(const at::Tensor& data) {
  const at::NoGradGuard no_grad;
  return make_net()->forward(data);
}

TEST(StepOptions, AWholeArgumentReachesEveryMicrobatch) {
  const at::Tensor data = rows(4, 8, 1), mask = rows(2, 8, 2), factor = torch::tensor(3.0);
  const auto outputs =
      run([](Model& model, const at::Tensor& x, const at::Tensor& m, const at::Tensor& f) { return model(x * m) * f; },
          {.non_split_inputs = {1, 2}}, data, mask, factor);
  for (int64_t m = 0; m < 2; ++m) {
    expect_bit_equal(outputs.at(static_cast<size_t>(m)), net_of(data.narrow(0, 2 * m, 2).clone() * mask) * 3.0, "part");
  }
}

TEST(StepOptions, AWholeArgumentMayBeMisalignedStridedOrAContainer) {
  const at::Tensor data = rows(4, 8, 1), misaligned = rows(3, 8, 2).flatten().narrow(0, 1, 16).view({2, 8});
  const std::vector<at::Tensor> whole{misaligned, rows(8, 2, 3).t()};
  const auto outputs =
      run([](Model& model, const at::Tensor& x, const std::vector<at::Tensor>& w) { return model(x * w[0] + w[1]); },
          {.non_split_inputs = {1}}, data, whole);
  expect_bit_equal(outputs[1], net_of(data.narrow(0, 2, 2).clone() * whole[0] + whole[1]), "the second part");
}

TEST(StepOptions, ABodyThatWritesToAWholeArgumentChangesItForNobodyElse) {
  const at::Tensor data = rows(4, 8, 1), mask = rows(2, 8, 2), before = mask.clone();
  const auto outputs = run(
      [](Model& model, const at::Tensor& x, at::Tensor m) {
        m.mul_(2);
        return model(x * m);
      },
      {.non_split_inputs = {1}}, data, mask);
  for (int64_t m = 0; m < 2; ++m) {
    expect_bit_equal(outputs[static_cast<size_t>(m)], net_of(data.narrow(0, 2 * m, 2).clone() * (before * 2)), "part");
  }
  expect_bit_equal(mask, before, "the argument");
}

TEST(StepOptions, AnArgumentIsCutAlongItsAxis) {
  const at::Tensor sequences = rows(3 * 4, 8, 1).view({3, 4, 8});  // [time, batch, features]
  for (const int64_t axis : {1, -2}) {
    const auto outputs =
        run([](Model& model, const at::Tensor& x) { return model(x); }, {.input_split_axes = {{0, axis}}}, sequences);
    for (int64_t m = 0; m < 2; ++m) {
      expect_bit_equal(outputs[static_cast<size_t>(m)], net_of(sequences.narrow(1, 2 * m, 2).clone()), "part");
    }
  }
}

TEST(StepOptions, TrainingWithThemEqualsTheEagerLoop) {
  run_smp_ranks(3, {.microbatches = 2}, [] {
    const auto net = make_net(), twin = make_net();
    Model model(net);
    auto step = smp::step(
        [&](at::Tensor data, at::Tensor target, at::Tensor weight) {
          const at::Tensor loss = ((model(data.t()) - target).square() * weight).mean();
          model.backward(loss);
          return loss;
        },
        {.non_split_inputs = {2}, .input_split_axes = {{0, 1}}});
    // Ranks that do not lead pass what they like.
    const bool leads = pp_rank() == 0;
    const at::Tensor data = rows(8, 4, 1), target = rows(4, 4, 2), weight = rows(1, 4, 3);
    for (int s = 0; s < 2; ++s) {
      const StepOutput loss = leads ? step(data, target, weight) : step(at::Tensor(), torch::empty({0}), at::Tensor());
      for (int64_t m = 0; m < 2; ++m) {
        const at::Tensor part = data.narrow(1, 2 * m, 2).clone();
        const at::Tensor want = ((twin->forward(part.t()) - target.narrow(0, 2 * m, 2)).square() * weight).mean();
        want.div(2).backward();
        expect_bit_equal(loss[m], want.detach(), "loss");
      }
    }
    tests::expect_twins(model, *twin, "two steps");
  });
}

TEST(StepOptions, StructsAreCutAndKeepWhatIsNoTensor) {
  const Batch batch{rows(4, 8, 1), {rows(4, 8, 2), rows(4, 8, 3)}, 0.5, "mine"};
  const auto body = [](Model& model, const Batch& part) {
    TORCH_CHECK(part.name == "mine" && part.targets.size() == 2);
    return model(part.data * part.scale + part.targets[1]);
  };
  const at::Tensor want = net_of((batch.data * 0.5 + batch.targets[1]).narrow(0, 2, 2).clone());
  expect_bit_equal(run(body, {}, batch)[1], want, "a struct");
  Batch changeable = batch;
  expect_bit_equal(run(body, {}, changeable)[1], want, "a struct that may change");
  EXPECT_TRUE(changeable.data.is_same(batch.data));
  const std::vector<Box<Batch>> nested{{batch}};
  expect_bit_equal(
      run([&](Model& model, const std::vector<Box<Batch>>& boxes) { return body(model, boxes[0].content); }, {}, nested)[1],
      want, "a struct in a template in a vector");
}

TEST(StepOptions, ObjectsCutThemselvesOnTheLeaderOnly) {
  const at::Tensor data = rows(8, 4, 1);
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    Model model(make_net());
    int64_t num_slices = 0;
    const Rows own{data, &num_slices};
    auto step = smp::step([&](const Rows& part) { return model(part.data.t()); }, {.input_split_axes = {{0, 1}}});
    const at::NoGradGuard no_grad;
    const StepOutput output = step(own);
    EXPECT_EQ(num_slices, rank() == 0 ? 2 : 0);
    expect_bit_equal(output[1], net_of(data.narrow(1, 2, 2).clone().t()), "the second part");
    auto whole = smp::step([&](const Rows& part) { return model(part.data.t()); }, {.non_split_inputs = {0}});
    expect_bit_equal(whole(own)[1], net_of(data.t()), "all of it");
  });
}

TEST(StepOptions, SlicesMayBeUnequalAndOfAnotherType) {
  const at::Tensor data = rows(3, 8, 1);
  const auto outputs = run([](Model& model, const at::Tensor& part) { return model(part); }, {}, Secret{data});
  expect_bit_equal(outputs[0], net_of(data.narrow(0, 0, 1)), "one row");
  expect_bit_equal(outputs[1], net_of(data.narrow(0, 1, 2).clone()), "two rows");
}

/// What every rank of two says to this step; a good one goes through afterwards.
template <class... Args>
void expect_refused(const StepOptions& options, const std::string& text, Args... args) {
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    Model model(make_net());
    const std::string message = message_of<c10::Error>([&] {
      auto step = smp::step([&](const auto&...) { return model(rows(2, 8, 1)); }, options);
      step(args...);
    });
    EXPECT_TRUE(contains(message, text)) << "rank " << rank() << ": " << message;
    auto good = smp::step([&](at::Tensor x) { return model(x); });
    EXPECT_NO_THROW(good(rows(4, 8, 1)));
  });
}

TEST(StepOptions, MistakesAreRefusedOnEveryRank) {
  const at::Tensor data = rows(4, 8, 1);
  expect_refused({.non_split_inputs = {1}}, "non_split_inputs: expected positions below 1, the number of arguments, got 1",
                 data);
  expect_refused({.input_split_axes = {{2, 0}}}, "input_split_axes: expected positions below 2", data, data);
  expect_refused({.non_split_inputs = {-1}}, "non_split_inputs: expected positions from 0, got -1", data);
  expect_refused({.input_split_axes = {{-1, 0}}}, "input_split_axes: expected positions from 0, got -1", data);
  expect_refused({.non_split_inputs = {0}, .input_split_axes = {{0, 1}}}, "got it in both", data);
  expect_refused({.detach_outputs = false}, "detach_outputs: expected true", data);
  expect_refused({.input_split_axes = {{0, 2}}}, "step argument 0: input_split_axes: expected a dimension of -2 ... 1",
                 data);
  expect_refused({.input_split_axes = {{0, -3}}}, "got -3", data);
  expect_refused(
      {.input_split_axes = {{1, 1}}},
      "microbatch split of step argument 1 along dimension 1: expected a batch size divisible by microbatches=2, got 7",
      data, rows(4, 7, 1));
  expect_refused({}, "step argument 1: expected a tensor with a batch dimension", data, torch::tensor(1.0));
  expect_refused({}, "step argument 0: expected a batch of rows, got none (sizes [0, 8], cut along dimension 0)",
                 data.slice(0, 0, 0));
  expect_refused({.non_split_inputs = {0}}, "requires a gradient", torch::ones({2}, at::requires_grad()));
  expect_refused({}, "expected smp_slice to return the same number of tensors", Uneven{data});
  expect_refused({.non_split_inputs = {0}}, "Let the body capture it instead", Secret{data});
}

TEST(StepOptions, AnExceptionOfSmpSliceIsRefusedOnEveryRank) {
  run_smp_ranks(2, {.microbatches = 2}, [] {
    Model model(make_net());
    auto step = smp::step([&](const at::Tensor& part) { return model(part); });
    try {
      step(Broken());
      ADD_FAILURE() << "went through on rank " << rank();
    } catch (const std::exception& error) {
      EXPECT_TRUE(contains(error.what(), "the page is torn")) << error.what();
    }
    EXPECT_NO_THROW(step(rows(4, 8, 1)));
  });
}

}  // namespace
}  // namespace smp
