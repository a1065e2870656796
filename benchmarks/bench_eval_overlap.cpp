// What it costs two processes that an evaluation body reads values of every microbatch: the step with reads over the
// same step without.
#include <torch/torch.h>

#include "benchmarks/measure.h"
#include "examples/transformer_lm/model.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
using transformer_lm::TransformerLm;

constexpr int64_t kVocabulary = 1000, kBatch = 32, kMicrobatches = 8, kTokens = 32;
constexpr int kRounds = 21;

void measure() {
  torch::manual_seed(0);
  auto net = std::make_shared<TransformerLm>(transformer_lm::ModelOptions{
      .vocab = kVocabulary, .width = 200, .heads = 4, .hidden = 800, .layers = 4, .max_tokens = kTokens});
  smp::DistributedModel model(net);
  model.eval();
  const auto hits_of = [&](const at::Tensor& data) { return model(data).argmax(-1).eq(data).sum(); };
  int64_t correct = 0;
  auto with_reads = smp::step([&](at::Tensor data) {
    const at::Tensor hits = hits_of(data);
    correct += hits.item<int64_t>();
    return hits;
  });
  auto without = smp::step(hits_of);
  const at::NoGradGuard no_grad;
  const auto data = torch::randint(kVocabulary, {kBatch, kTokens});
  without(data);
  const auto hits = with_reads(data).reduce_sum().item<int64_t>();
  require(smp::rank() != 0 || hits == correct, "the values that the body read are not those it returned");
  const Comparison times = compare(
      kRounds,
      [&] {
        with_reads(data);
        smp::barrier();
      },
      [&] {
        without(data);
        smp::barrier();
      });
  if (smp::rank() != 0) return;
  report("eval_overlap_2", times.ratio, "x",
         {{"with reads ms", 1e3 * times.first_seconds}, {"without ms", 1e3 * times.second_seconds}});
}

}  // namespace

int main() {
  at::set_num_threads(1);
  smp::init({.microbatches = kMicrobatches, .log_level = smp::LogLevel::kOff});
  require(smp::size() == 2, "expected two processes; start it with: smp run -np 2 bench_eval_overlap");
  measure();
  smp::shutdown();
}
