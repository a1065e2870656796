// How long a sequence length that a 12-layer transformer has not seen takes longer than one that it has: capture, plan,
// table and the stages' preparation, in a world of one.
#include <torch/torch.h>

#include "benchmarks/measure.h"
#include "examples/transformer_lm/model.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
using transformer_lm::TransformerLm;

constexpr int64_t kVocabulary = 100, kBatch = 4, kFirstLength = 8, kLengths = 12;

void measure() {
  torch::manual_seed(0);
  auto net = std::make_shared<TransformerLm>(transformer_lm::ModelOptions{
      .vocab = kVocabulary, .width = 64, .heads = 4, .hidden = 128, .layers = 12, .max_tokens = kFirstLength + kLengths});
  smp::DistributedModel model(net);
  auto train_step = smp::step([&](at::Tensor data) {
    const auto logits = model(data);
    const auto loss =
        torch::nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), data.reshape({-1}));
    model.backward(loss);
    return loss;
  });
  std::vector<double> extra, known;
  for (int64_t length = kFirstLength; length < kFirstLength + kLengths; ++length) {
    const auto data = torch::randint(kVocabulary, {kBatch, length});
    const double first = seconds_of([&] { train_step(data); });
    std::vector<double> again;
    for (int i = 0; i < 5; ++i) again.push_back(seconds_of([&] { train_step(data); }));
    if (length == kFirstLength) continue;  // which also places the model and registers kernels
    known.push_back(median(again));
    extra.push_back(first - known.back());
  }
  report("new_signature_ms", 1e3 * median(extra), "ms", {{"known length ms", 1e3 * median(known)}});
}

}  // namespace

int main() {
  at::set_num_threads(1);
  smp::init({.microbatches = 4, .log_level = smp::LogLevel::kOff});
  measure();
  smp::shutdown();
}
