// How long a sequence length that a 12-layer transformer has not seen takes longer than one that it has: capture, plan,
// table and the stages' preparation, in a world of one. Against a known length under autograd, as the first step of each
// length runs: from tapes the later ones are faster still.
#include <torch/torch.h>

#include "benchmarks/measure.h"
#include "examples/transformer_lm/model.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
using transformer_lm::TransformerLm;

constexpr int64_t kVocabulary = 100, kBatch = 4, kFirstLength = 8, kLengths = 12;

/// Seconds by length.
struct Steps {
  std::vector<double> first, known;
};

Steps measure(smp::StageKind stage) {
  smp::init({.microbatches = 4, .stage = stage, .log_level = smp::LogLevel::kOff});
  torch::manual_seed(0);
  auto net = std::make_shared<TransformerLm>(transformer_lm::ModelOptions{
      .vocab = kVocabulary, .width = 64, .heads = 4, .hidden = 128, .layers = 12, .max_tokens = kFirstLength + kLengths});
  smp::DistributedModel model(net);
  auto train_step = smp::step([&](at::Tensor data) {
    const auto logits = model(data);
    const auto loss = torch::nn::functional::cross_entropy(logits.reshape({-1, kVocabulary}), data.reshape({-1}));
    model.backward(loss);
    return loss;
  });
  Steps steps;
  for (int64_t length = kFirstLength; length < kFirstLength + kLengths; ++length) {
    const auto data = torch::randint(kVocabulary, {kBatch, length});
    const double first = seconds_of([&] { train_step(data); });
    std::vector<double> again;
    for (int i = 0; i < 5; ++i) again.push_back(seconds_of([&] { train_step(data); }));
    if (length == kFirstLength) continue;  // which also places the model and registers kernels
    steps.known.push_back(median(again));
    steps.first.push_back(first);
  }
  return steps;
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const Steps eager = measure(smp::StageKind::kAutograd);
  smp::shutdown();
  const Steps taped = measure(smp::StageKind::kTape);
  smp::shutdown();
  std::vector<double> extra;
  for (size_t i = 0; i < taped.first.size(); ++i) extra.push_back(taped.first[i] - eager.known[i]);
  report("new_signature_ms", 1e3 * median(extra), "ms",
         {{"known length ms", 1e3 * median(eager.known)}, {"taped ms", 1e3 * median(taped.known)}});
}
