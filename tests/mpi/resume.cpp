// A run of one process group from one step to another: starts or resumes, trains with dropout, an optimizer and a
// scheduler, saves. resume FOLDER FIRST LAST [OPTIMIZER] prints the losses of steps FIRST to LAST - 1, exactly. Stops
// earlier where it is asked to. Driven by resume_test.py, and by tests/python/cpp_files_test.py, where Python takes turns
// with it.
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "smp/smp.h"

namespace {

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& tokens) {
    auto [hidden, state] = lstm(embedding(tokens));
    hidden = dropout(norm(hidden.flatten(0, 1)));
    return head(torch::relu(dropout(middle(hidden))));
  }
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(11, 8));
  torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(8, 16).batch_first(true)));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(16));
  torch::nn::Dropout dropout = register_module("dropout", torch::nn::Dropout(0.3));
  torch::nn::Linear middle = register_module("middle", torch::nn::Linear(16, 16));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(16, 11));
};
TORCH_MODULE(Net);

at::Tensor batch(int step) {
  auto numbers = at::make_generator<at::CPUGeneratorImpl>(100 + step);
  const at::Tensor whole = torch::randint(11, {8, 5}, numbers, torch::kLong);
  return whole.chunk(smp::dp_size())[smp::dp_rank()];
}

int run(const std::string& folder, int first, int last, const auto& make_optimizer) {
  smp::init();
  torch::manual_seed(first);  // what is not loaded differs
  Net net;
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(make_optimizer(net->parameters()), model);
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/3, /*gamma=*/0.5);
  auto step = smp::step([&](at::Tensor tokens) {
    auto loss = torch::cross_entropy_loss(model(tokens), tokens.flatten());
    model.backward(loss);
    return loss;
  });
  if (first > 0) {
    for (int s = 0; s < first; ++s) scheduler.step();
    const smp::UserContent user = smp::load_state(folder, model, optimizer);
    if (std::stoi(user.at("step")) != first) return 3;
  }
  for (int s = first; s < last; ++s) {
    optimizer.zero_grad();
    const at::Tensor loss = smp::all_reduce_mean(step(batch(s)).reduce_mean());
    optimizer.step();
    scheduler.step();
    if (smp::rank() == 0) std::printf("loss %d %a\n", s, loss.item<double>());
    std::fflush(stdout);
    if (smp::stop_requested()) {
      smp::save_state(folder, model, optimizer, {{"step", std::to_string(s + 1)}});
      smp::shutdown();
      return smp::kExitPreempted;
    }
  }
  smp::save_state(folder, model, optimizer, {{"step", std::to_string(last)}});
  smp::shutdown();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  using namespace torch::optim;
  const std::string kind = argc > 4 ? argv[4] : "Adam";
  const auto with = [&](const auto& make) { return run(argv[1], std::stoi(argv[2]), std::stoi(argv[3]), make); };
  if (kind == "SGD") {
    return with([](auto all) { return SGD(all, SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(1e-3)); });
  }
  if (kind == "RMSprop") return with([](auto all) { return RMSprop(all, RMSpropOptions(0.01).momentum(0.9)); });
  if (kind == "Adagrad") return with([](auto all) { return Adagrad(all, AdagradOptions(0.1).lr_decay(0.01)); });
  if (kind == "AdamW") return with([](auto all) { return AdamW(all, AdamWOptions(0.01).amsgrad(true)); });
  return with([](auto all) { return Adam(all, AdamOptions(0.01)); });
}
