// Trains a language model on lines of many lengths, over all processes that the launcher has started.
//
//   variable_length                                one process
//   smp run -np 2 variable_length --bucket-width 2  two, twice as many lengths
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <optional>
#include <set>

#include "examples/common/clock.h"
#include "examples/common/flags.h"
#include "examples/common/optimizers.h"
#include "examples/common/replicas.h"
#include "examples/common/step_log.h"
#include "examples/transformer_lm/corpus.h"
#include "examples/transformer_lm/model.h"
#include "examples/transformer_lm/placement.h"
#include "examples/variable_length/buckets.h"
#include "smp/smp.h"

namespace variable_length {
namespace {

using transformer_lm::TransformerLm;

struct Settings {
  examples::Flags common{.epochs = 3, .batch_size = 32, .optimizer = examples::Optimizer::kAdam, .lr = 0.003};
  transformer_lm::ModelOptions model{.width = 64, .heads = 4, .hidden = 128, .layers = 2, .dropout = 0.1};
  BucketOptions buckets;
};

std::optional<int> parse(int argc, char** argv, Settings& settings) {
  examples::FlagParser parser("Trains a language model on lines of many lengths.", settings.common);
  parser.add("--bucket-width", settings.buckets.width, "Lengths are multiples of this");
  parser.add("--max-length", settings.buckets.max_length, "Longer lines are cut into parts");
  parser.add("--width", settings.model.width, "Width of the model");
  parser.add("--heads", settings.model.heads, "Heads of each attention");
  parser.add("--hidden", settings.model.hidden, "Width of each feed-forward block");
  parser.add("--layers", settings.model.layers, "Encoder layers");
  parser.add("--dropout", settings.model.dropout, "Probability of dropout");
  return parser.parse(argc, argv);
}

struct Data {
  std::vector<Bucket> train, valid, test;
  int64_t vocab = 0;
};

Data load(const Settings& settings) {
  const transformer_lm::Text text = transformer_lm::read_text(settings.common.data);
  const transformer_lm::Vocabulary vocabulary(text.train, {.min_frequency = 2});
  const auto buckets = [&](const std::string& split) { return make_buckets(vocabulary.encode(split), settings.buckets); };
  return {buckets(text.train), buckets(text.valid), buckets(text.test), vocabulary.size()};
}

class Training {
 public:
  Training(const Settings& settings, const Data& data, std::shared_ptr<TransformerLm> net)
      : flags_(settings.common),
        data_(data),
        rows_(examples::rows_per_replica(flags_.batch_size)),
        model_(std::move(net)),
        log_(flags_.log, smp::rank() == 0) {
    TORCH_CHECK_VALUE(!full_batches(data_.train, flags_.batch_size, 0).empty(),
                      "--batch-size: expected at most as many lines as a bucket has, got ", flags_.batch_size,
                      ". Give more text or a larger --bucket-width.");
  }

  /// From the first step to the test perplexity.
  template <class Optimizer>
  void run(Optimizer plain) {
    smp::DistributedOptimizer optimizer(std::move(plain), model_);
    auto train_step = smp::step([&](at::Tensor input, at::Tensor target) {
      auto loss = torch::cross_entropy_loss(model_(input).flatten(0, 1), target.flatten());
      model_.backward(loss);
      return loss;
    });
    auto sum_step = smp::step([&](at::Tensor input, at::Tensor target) {
      return torch::cross_entropy_loss(model_(input).flatten(0, 1), target.flatten(), /*weight=*/{}, at::Reduction::Sum);
    });
    for (int64_t epoch = 1; epoch <= flags_.epochs && !is_over(); ++epoch) {
      for (const Place& place : full_batches(data_.train, flags_.batch_size, flags_.seed + epoch)) {
        if (is_over()) break;
        const Bucket batch = my_lines(data_.train, place);
        const double start = examples::seconds_now();
        train_lengths_.insert(batch.length());
        optimizer.zero_grad();
        const smp::StepOutput losses = train_step(batch.data, batch.target);
        smp::clip_grad_norm_(model_, 0.5);
        optimizer.step();
        note_step(losses, batch.length(), examples::seconds_now() - start);
      }
      print_epoch(epoch, evaluate(sum_step, data_.valid));
    }
    finish(evaluate(sum_step, data_.test));
  }

 private:
  bool is_over() const { return flags_.steps > 0 && step_ >= flags_.steps; }

  Bucket my_lines(const std::vector<Bucket>& buckets, const Place& place) const {
    return get_lines(buckets[static_cast<size_t>(place.bucket)], place.first + smp::dp_rank() * rows_, rows_);
  }

  /// Mean loss per word of all lines, in evaluation mode and without gradients. Collective over the world.
  template <class SumStep>
  double evaluate(SumStep& sum_step, const std::vector<Bucket>& buckets) {
    const torch::NoGradGuard no_grad;
    model_.eval();
    auto sums = torch::zeros({2}, torch::kDouble);  // of this replica: loss, words
    for (const Place& place : all_batches(buckets, flags_.batch_size)) {
      const Bucket batch = my_lines(buckets, place);
      evaluation_lengths_.insert(batch.length());
      sums[0] += sum_step(batch.data, batch.target).reduce_sum();
      sums[1] += batch.target.ne(kNoTarget).sum();
    }
    model_.train();
    sums = smp::all_reduce_mean(sums, smp::DP_GROUP);
    return (sums[0] / sums[1]).item<double>();
  }

  void note_step(const smp::StepOutput& losses, int64_t length, double step_s) {
    const double loss = smp::all_reduce_mean(losses.reduce_mean(), smp::DP_GROUP).item<double>();
    if (++step_ == 1) log_.start(smp::config().to_json(), model_.plan_json());
    log_.step({.step = step_, .loss = loss, .step_s = step_s, .figures = {{"length", static_cast<double>(length)}}});
    epoch_loss_ += loss;
    ++epoch_steps_;
  }

  void print_epoch(int64_t epoch, double valid_loss) {
    if (smp::rank() == 0) {
      std::printf("epoch %2ld | loss %.3f | valid loss %.3f | valid perplexity %.1f | %ld graphs\n", epoch,
                  epoch_loss_ / static_cast<double>(epoch_steps_), valid_loss, std::exp(valid_loss), smp::num_graphs());
      std::fflush(stdout);
    }
    epoch_loss_ = 0, epoch_steps_ = 0;
  }

  void finish(double test_loss) {
    if (smp::rank() != 0) return;
    std::printf("test perplexity %.1f | %ld graphs were made, for %zu lengths in training and %zu in evaluation\n",
                std::exp(test_loss), smp::num_graphs(), train_lengths_.size(), evaluation_lengths_.size());
    log_.finish({{"test_loss", test_loss}, {"graphs", static_cast<double>(smp::num_graphs())}});
  }

  examples::Flags flags_;
  const Data& data_;
  int64_t rows_;  // of a batch, for this replica
  smp::DistributedModel<TransformerLm> model_;
  examples::StepLog log_;
  int64_t step_ = 0;
  std::set<int64_t> train_lengths_, evaluation_lengths_;
  double epoch_loss_ = 0;
  int64_t epoch_steps_ = 0;
};

void train(Settings settings) {
  const Data data = load(settings);
  settings.model.vocab = data.vocab;
  settings.model.max_tokens = settings.buckets.max_length;
  torch::manual_seed(settings.common.seed);
  auto net = std::make_shared<TransformerLm>(settings.model);
  if (settings.common.partition == examples::Partition::kManual) place_by_hand(*net, smp::pp_size());
  Training training(settings, data, net);
  examples::with_optimizer(settings.common, [&](auto make) { training.run(make(net->parameters())); });
}

}  // namespace
}  // namespace variable_length

int main(int argc, char** argv) {
  variable_length::Settings settings;
  if (const auto exit_code = variable_length::parse(argc, argv, settings)) return *exit_code;
  smp::init(settings.common.config());
  variable_length::train(settings);
  smp::shutdown();
}
