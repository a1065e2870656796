// What a user's first program needs of an smp that is installed or vendored: one header, one target. It trains a little.
#include <smp/smp.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  smp::init({.microbatches = 2, .log_level = smp::LogLevel::kOff});
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::ReLU(), torch::nn::Linear(16, 1));
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(torch::optim::AdamW(net->parameters(), 1e-2), model);
  auto train_step = smp::step([&](at::Tensor data, at::Tensor target) {
    auto loss = torch::mse_loss(model(data), target);
    model.backward(loss);
    return loss;
  });
  const at::Tensor data = torch::randn({32, 4});
  double first = 0, last = 0;
  for (int step = 0; step < 50; ++step) {
    optimizer.zero_grad();
    last = train_step(data, data.sum(1, /*keepdim=*/true)).reduce_mean().item<double>();
    if (step == 0) first = last;
    smp::clip_grad_norm_(model, 1.0);
    optimizer.step();
  }
  std::printf("smp %s: loss %g after 1 step, %g after 50\n", smp::version(), first, last);
  smp::shutdown();
  return last < first / 2 ? 0 : 1;
}
