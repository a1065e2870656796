// Stages chosen by hand survive what happens to a module between its construction and the first step.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <set>

#include "smp/engine/context/context.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using tests::make_net;
using tests::rows;
using tests::run_smp_ranks;
using tests::SmallNet;

struct Guarded : torch::nn::Module {
  Guarded() {
    const PartitionGuard guard(1);
    first = register_module("first", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr};
  torch::nn::Linear second = register_module("second", torch::nn::Linear(8, 8));
};

struct GuardedTwice : torch::nn::Module {
  GuardedTwice() {
    const PartitionGuard guard(1);
    first = register_module("first", torch::nn::Linear(8, 8));
    {
      const PartitionGuard inner(0);
      second = register_module("second", torch::nn::Linear(8, 8));
      torch::nn::init::zeros_(first->bias);  // is seen again
    }
    third = register_module("third", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return third(second(torch::tanh(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
};

template <class Net>
std::set<std::string> local_after_a_step(const std::shared_ptr<Net>& net, at::ScalarType dtype) {
  DistributedModel<Net> model(net);
  auto step = smp::step([&](at::Tensor data) { return model(data).sum(); });
  const at::NoGradGuard no_grad;
  step(rows(4, 8, 1, dtype));
  std::set<std::string> local;
  for (const auto& [name, tensor] : model.local_named_parameters()) local.insert(name);
  return local;
}

TEST(ManualPlacement, OfAGuardHoldsAfterAConversion) {
  run_smp_ranks(2, {}, [] {
    const auto net = std::make_shared<Guarded>();
    set_partition(*net->second, 0);
    net->to(at::kDouble);
    EXPECT_EQ(local_after_a_step(net, at::kDouble).contains("first.weight"), pp_rank() == 1);
  });
}

TEST(ManualPlacement, OfTheInnermostGuardCounts) {
  run_smp_ranks(2, {}, [] {
    const std::set<std::string> local = local_after_a_step(std::make_shared<GuardedTwice>(), at::kFloat);
    for (const char* name : {"first.weight", "first.bias", "third.weight", "second.weight"}) {
      EXPECT_EQ(local.contains(name), pp_rank() == (name[0] == 's' ? 0 : 1)) << name;
    }
  });
}

TEST(ManualPlacement, OfSetPartitionHoldsAfterAConversion) {
  run_smp_ranks(2, {}, [] {
    const auto net = make_net();
    for (auto& layer : {net->first, net->second, net->third}) set_partition(*layer, 1);
    set_partition(*net->fourth, 0);
    net->to(at::kDouble);
    EXPECT_EQ(local_after_a_step(net, at::kDouble).contains("first.weight"), pp_rank() == 1);
  });
}

TEST(ManualPlacement, SetAfterAConversionOverridesTheGuard) {
  run_smp_ranks(2, {}, [] {
    const auto net = std::make_shared<Guarded>();
    net->to(at::kDouble);
    set_partition(*net->first, 0);
    set_partition(*net->second, 1);
    EXPECT_EQ(local_after_a_step(net, at::kDouble).contains("first.weight"), pp_rank() == 0);
  });
}

/// What rank 0 logs while `fn` runs on two ranks.
std::string logged(const std::function<void()>& fn) {
  FILE* file = std::tmpfile();
  run_smp_ranks(2, {.microbatches = 2}, [&] {
    if (rank() == 0) engine::context("test").logger = engine::Logger(LogLevel::kWarning, fileno(file));
    fn();
  });
  std::string text(static_cast<size_t>(lseek(fileno(file), 0, SEEK_END)), '\0');
  EXPECT_EQ(pread(fileno(file), text.data(), text.size(), 0), static_cast<ssize_t>(text.size()));
  std::fclose(file);
  return text;
}

TEST(ManualPlacement, OfTensorsThatAreGoneIsWarnedOfOnce) {
  const std::string text = logged([] {
    set_partition(*make_net(), 1);
    const auto net = make_net();
    local_after_a_step(net, at::kFloat);
  });
  const size_t first = text.find("set_partition: expected");
  EXPECT_NE(first, std::string::npos) << text;
  EXPECT_NE(text.find("8 of them"), std::string::npos) << text;
  EXPECT_EQ(text.find("set_partition: expected", first + 1), std::string::npos) << text;
}

TEST(ManualPlacement, OfTheModelItselfIsNotWarnedOf) {
  EXPECT_EQ(logged([] {
              const auto net = make_net();
              set_partition(*net->first, 1);
              net->to(at::kDouble);
              local_after_a_step(net, at::kDouble);
            }),
            "");
}

}  // namespace
}  // namespace smp
