// How much faster two processes train the language model of the example than one: forward, backward, clipping and SGD over
// eight microbatches. One process is the plain LibTorch loop, without smp.
#include <torch/torch.h>

#include "benchmarks/measure.h"
#include "examples/transformer_lm/corpus.h"
#include "examples/transformer_lm/model.h"
#include "smp/smp.h"

namespace {

using namespace smp::benchmarks;
using transformer_lm::TransformerLm;

constexpr int64_t kBatch = 16, kMicrobatches = 8, kTokens = 32, kRows = kBatch / kMicrobatches;
constexpr double kRate = 0.1, kMaxNorm = 0.5;
constexpr int kRounds = 15;

std::shared_ptr<TransformerLm> make_net(int64_t vocabulary) {
  torch::manual_seed(0);
  return std::make_shared<TransformerLm>(transformer_lm::ModelOptions{
      .vocab = vocabulary, .width = 200, .heads = 4, .hidden = 800, .layers = 4, .max_tokens = kTokens});
}

at::Tensor token_loss(const at::Tensor& logits, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(logits.reshape({-1, logits.size(-1)}), target.reshape({-1}));
}

// What a user of one process would write.
class PlainTraining {
 public:
  explicit PlainTraining(std::shared_ptr<TransformerLm> net) : net_(std::move(net)), optimizer_(net_->parameters(), kRate) {}

  std::vector<at::Tensor> gradients(const transformer_lm::Batch& batch) {
    std::vector<at::Tensor> losses;
    optimizer_.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      const auto loss =
          token_loss(net_->forward(batch.data.narrow(0, m * kRows, kRows)), batch.target.narrow(0, m * kRows, kRows));
      (loss / kMicrobatches).backward();
      losses.push_back(loss.detach());
    }
    return losses;
  }

  void step(const transformer_lm::Batch& batch) {
    gradients(batch);
    torch::nn::utils::clip_grad_norm_(net_->parameters(), kMaxNorm);
    optimizer_.step();
  }

  TransformerLm& net() { return *net_; }

 private:
  std::shared_ptr<TransformerLm> net_;
  torch::optim::SGD optimizer_;
};

class SplitTraining {
 public:
  explicit SplitTraining(std::shared_ptr<TransformerLm> net)
      : model_(net), optimizer_(torch::optim::SGD(net->parameters(), kRate), model_) {}

  smp::StepOutput gradients(const transformer_lm::Batch& batch) {
    optimizer_.zero_grad();
    return step_(batch.data, batch.target);
  }

  void step(const transformer_lm::Batch& batch) {
    gradients(batch);
    smp::clip_grad_norm_(model_, kMaxNorm);
    optimizer_.step();
  }

  smp::DistributedModel<TransformerLm>& model() { return model_; }

 private:
  smp::DistributedModel<TransformerLm> model_;
  smp::DistributedOptimizer<torch::optim::SGD> optimizer_;
  smp::Step<std::function<at::Tensor(at::Tensor, at::Tensor)>> step_{[this](at::Tensor input, at::Tensor target) {
    auto loss = token_loss(model_(input), target);
    model_.backward(loss);
    return loss;
  }};
};

// Without dropout, with the weights both started from, the losses are those of the plain loop.
void require_same_losses(PlainTraining& plain, SplitTraining& split, const transformer_lm::Batch& batch) {
  split.gradients(batch);  // places the model as its training step wants it
  plain.net().eval();
  split.model().eval();
  const auto got = split.gradients(batch);
  const auto want = plain.gradients(batch);
  for (int64_t m = 0; m < got.size(); ++m) {
    require(torch::equal(got[m], want[static_cast<size_t>(m)]),
            "a loss on two processes differs from that of the plain loop");
  }
  plain.net().train();
  split.model().train();
}

void measure() {
  const auto text = transformer_lm::read_text("");
  const transformer_lm::Vocabulary vocabulary(text.train);
  const auto columns = transformer_lm::batchify(vocabulary.encode(text.train), kBatch);
  const auto batch = transformer_lm::get_batch(columns, 0, kTokens);
  PlainTraining plain(make_net(vocabulary.size()));
  SplitTraining split(make_net(vocabulary.size()));
  require_same_losses(plain, split, batch);
  std::vector<double> ones, twos, ratios;
  for (int round = 0; round < kRounds; ++round) {
    smp::barrier();
    if (smp::rank() == 0) ones.push_back(seconds_of([&] { plain.step(batch); }));
    smp::barrier();  // the other process sleeps in here while one works alone
    twos.push_back(seconds_of([&] {
      split.step(batch);
      smp::barrier();
    }));
    if (smp::rank() == 0) ratios.push_back(ones.back() / twos.back());
  }
  if (smp::rank() != 0) return;
  report("speedup_2_transformer_lm", median(ratios), "x",
         {{"one process ms", 1e3 * median(ones)},
          {"two processes ms", 1e3 * median(twos)},
          {"predicted ms without optimizer", 1e3 * split.model().predicted_step_s()}});
}

}  // namespace

int main() {
  at::set_num_threads(1);
  smp::Config config;
  config.microbatches = kMicrobatches;
  config.log_level = smp::LogLevel::kOff;
  smp::init(config);
  require(smp::size() == 2, "expected two processes; start it with: smp run -np 2 bench_speedup");
  measure();
  smp::shutdown();
}
