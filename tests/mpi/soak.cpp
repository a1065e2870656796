// A long run under mpirun: dropout, batch norm, two lengths of sequence, evaluation with reads every ten steps. What each
// process holds after 200 steps, it holds after the last one. `soak STEPS STAGES`
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

#include "examples/common/resident_memory.h"
#include "examples/common/tensor_memory.h"
#include "smp/smp.h"

namespace {

constexpr int kFirstLook = 200;
constexpr double kTolerance = 0.01;
constexpr int64_t kVocabulary = 50, kWidth = 32, kBatch = 8, kMicrobatches = 4;
int num_steps = 0;

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor hidden = norm(embedding(tokens).flatten(0, 1));
    hidden = dropout(torch::relu(first(hidden)));
    return head(dropout(torch::relu(second(hidden))));
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(kWidth));
  torch::nn::Linear first = register_module("first", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear second = register_module("second", torch::nn::Linear(kWidth, kWidth));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(kWidth, kVocabulary));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.2));
};
TORCH_MODULE(Net);

struct Memory {
  double resident, heap, tensors;  // bytes: of the process, from malloc, in tensors
};

Memory memory_now(const examples::TensorMemory& tensors) {
  const auto heap = mallinfo2();
  return {static_cast<double>(examples::resident_bytes()), static_cast<double>(heap.uordblks + heap.hblkhd),
          static_cast<double>(tensors.current_bytes())};
}

void expect_flat(const char* what, double before, double after) {
  std::printf("rank %d: %s %.0f bytes after %d steps, %.0f after %d\n", smp::rank(), what, before, kFirstLook, after,
              num_steps);
  EXPECT_LE(std::abs(after - before), kTolerance * before) << what << ", rank " << smp::rank();
}

TEST(Soak, MemoryIsFlatOnAllRanks) {
  const examples::TensorMemory tensors;
  torch::manual_seed(1);
  Net net;
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 1e-3), model);
  auto train = smp::step([&](at::Tensor tokens) {
    auto loss = torch::cross_entropy_loss(model(tokens), tokens.flatten());
    model.backward(loss);
    return loss;
  });
  int64_t correct = 0;
  auto evaluate = smp::step([&](at::Tensor tokens) {
    const at::Tensor hits = model(tokens).argmax(-1).eq(tokens.flatten()).sum();
    correct += hits.item<int64_t>();
    return hits;
  });
  Memory before{};
  for (int s = 1; s <= num_steps; ++s) {
    const auto tokens = torch::randint(kVocabulary, {kBatch, s % 2 == 0 ? 5 : 9});
    optimizer.zero_grad();
    train(tokens);
    optimizer.step();
    if (s % 10 == 0) {
      model.eval();
      const at::NoGradGuard no_grad;
      evaluate(tokens);
      model.train();
    }
    if (s == kFirstLook) before = memory_now(tensors);
  }
  const Memory after = memory_now(tensors);
  expect_flat("resident", before.resident, after.resident);
  expect_flat("heap", before.heap, after.heap);
  expect_flat("tensors", before.tensors, after.tensors);
  EXPECT_EQ(correct > 0, smp::pp_rank() == 0);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  GTEST_FLAG_SET(catch_exceptions, false);  // an exception ends the job instead of one rank's test
  num_steps = argc > 1 ? std::atoi(argv[1]) : 2000;
  at::set_num_threads(1);
  smp::init({.pipeline_parallel_degree = argc > 2 ? std::atoi(argv[2]) : 0,
             .microbatches = kMicrobatches,
             .log_level = smp::LogLevel::kWarning});
  const int failed = RUN_ALL_TESTS();
  smp::shutdown();
  return failed;
}
