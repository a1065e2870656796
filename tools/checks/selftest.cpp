// smp_selftest, which `smp selftest` starts on every rank: trains a model split over all ranks, and on each rank the same
// model with plain LibTorch. All bits must be equal; hosts that compute differently are told apart from a split that is
// wrong.
#include <torch/torch.h>

#include <boost/container_hash/hash.hpp>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "smp/smp.h"

namespace {

constexpr int kSteps = 4, kVocabulary = 50, kWidth = 32, kRows = 16, kLength = 6;

torch::nn::Sequential make_net(int num_layers) {
  torch::manual_seed(1);
  torch::nn::Sequential net(torch::nn::Embedding(kVocabulary, kWidth));
  for (int layer = 0; layer < num_layers; ++layer) {
    net->push_back(torch::nn::Linear(kWidth, kWidth));
    net->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    net->push_back(torch::nn::GELU());
  }
  net->push_back(torch::nn::Linear(kWidth, kVocabulary));
  return net;
}

at::Tensor tokens_of(int step, int replica) {
  auto numbers = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(100 * step + replica));
  return torch::randint(kVocabulary, {kRows, kLength}, numbers, torch::kLong);
}

at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& tokens) {
  return torch::cross_entropy_loss(scores.flatten(0, 1), tokens.flatten());
}

using Bits = std::map<std::string, uint64_t>;

uint64_t bits_of(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().cpu().contiguous();
  const auto* bytes = static_cast<const char*>(dense.const_data_ptr());
  return boost::hash_range(bytes, bytes + dense.nbytes());
}

// The weights after all steps, without smp: what replicas add up is added in their order.
Bits train_plainly(int num_layers, int num_replicas, int64_t num_microbatches, at::Device device) {
  auto net = make_net(num_layers);
  net->to(device);
  torch::optim::Adam optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> sums;
    for (int replica = 0; replica < num_replicas; ++replica) {
      optimizer.zero_grad();
      for (const at::Tensor& part : tokens_of(step, replica).to(device).chunk(num_microbatches))
        (loss_of(net->forward(part), part) / num_microbatches).backward();
      size_t i = 0;
      for (const at::Tensor& parameter : net->parameters()) {
        if (replica == 0)
          sums.push_back(parameter.grad().clone());
        else
          sums[i++].add_(parameter.grad());
      }
    }
    size_t i = 0;
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = sums[i++] / num_replicas;
    optimizer.step();
  }
  Bits bits;
  for (const auto& named : net->named_parameters()) bits[named.key()] = bits_of(named.value());
  return bits;
}

// The weights that live on this rank, and where.
Bits train_split(int num_layers, at::Device& device) {
  auto net = make_net(num_layers);
  smp::DistributedModel model(net);
  smp::DistributedOptimizer optimizer(torch::optim::Adam(net->parameters(), 1e-2), model);
  auto train_step = smp::step([&](at::Tensor tokens) {
    auto loss = loss_of(model(tokens), tokens);
    model.backward(loss);
    return loss;
  });
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    train_step(tokens_of(step, smp::dp_rank()));
    optimizer.step();
  }
  Bits bits;
  for (const auto& [name, parameter] : model.local_named_parameters())
    device = parameter.device(), bits[name] = bits_of(parameter);
  return bits;
}

// Ranks whose `values` are not those of rank 0.
std::string unlike_first(const std::vector<Bits>& values) {
  std::string ranks;
  for (size_t rank = 1; rank < values.size(); ++rank)
    if (values[rank] != values[0]) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  return ranks;
}

}  // namespace

int main() {
  smp::init({.microbatches = 4, .log_level = smp::LogLevel::kWarning});
  const int num_layers = 2 * smp::pp_size();
  at::Device device = at::kCPU;
  const Bits split = train_split(num_layers, device);
  const Bits plain = train_plainly(num_layers, smp::dp_size(), smp::config().microbatches, device);
  std::string complaint;
  for (const auto& [name, bits] : split)
    if (complaint.empty() && bits != plain.at(name)) complaint = name;
  const auto of_all = smp::allgather(plain, smp::CommGroup::WORLD);
  const auto complaints = smp::allgather(complaint, smp::CommGroup::WORLD);
  const std::string others = unlike_first(of_all);
  bool is_wrong = !others.empty();
  if (smp::rank() == 0 && is_wrong)
    std::printf("ranks %s compute other bits than rank 0, without smp too: their processors or libraries differ\n",
                others.c_str());
  for (size_t rank = 0; rank < complaints.size(); ++rank) {
    if (complaints[rank].empty()) continue;
    is_wrong = true;
    if (smp::rank() == 0) std::printf("rank %zu: '%s' has other bits than without smp\n", rank, complaints[rank].c_str());
  }
  if (smp::rank() == 0 && !is_wrong)
    std::printf("%d stages and %d replicas train with the bits of plain LibTorch\n", smp::pp_size(), smp::dp_size());
  smp::shutdown();
  return is_wrong ? 1 : 0;
}
