// Trains a transformer language model over all processes that the launcher has started.
//
//   transformer_lm                           one process
//   smp run -np 4 transformer_lm --steps 50  four, each with a part of the model
//   smp run -np 4 transformer_lm --preset tutorial --steps 3 --no-evaluation
//                                            a billion parameters, of which no process holds more than its part
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "examples/common/clock.h"
#include "examples/common/flags.h"
#include "examples/common/optimizers.h"
#include "examples/common/replicas.h"
#include "examples/common/step_log.h"
#include "examples/transformer_lm/best_weights.h"
#include "examples/transformer_lm/corpus.h"
#include "examples/transformer_lm/evaluation.h"
#include "examples/transformer_lm/memory.h"
#include "examples/transformer_lm/model.h"
#include "examples/transformer_lm/placement.h"
#include "examples/transformer_lm/report.h"
#include "smp/smp.h"

namespace transformer_lm {
namespace {

struct Settings {
  // At a rate of 1 the first epoch is chaotic: differences in the last bit, as between one replica
  // and two, grow to percents.
  examples::Flags common{.epochs = 18, .batch_size = 16, .microbatches = 8, .lr = 0.3};
  ModelOptions model{.width = 200, .heads = 4, .hidden = 800, .layers = 4};
  int64_t bptt = 32;
  int64_t print_every = 20;
  std::string save;
  std::string preset = "small";
  int64_t min_vocab = 2;
  bool is_delayed = false;
  bool skips_evaluation = false;
};

/// The model of PyTorch's pipeline tutorial, 1.04 billion parameters with the vocabulary of WikiText-2.
void use_tutorial(Settings& settings) {
  settings.model = {.width = 4096, .heads = 16, .hidden = 4096, .layers = 8};
  settings.common.batch_size = 20;
  settings.common.microbatches = 4;
  settings.bptt = 35;
  settings.print_every = 1;
  settings.min_vocab = 28782;
  settings.is_delayed = true;
}

/// The value of --preset, which is looked at before the other flags: they change what it sets.
std::string preset_in(int argc, char** argv) {
  const std::string flag = "--preset";
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == flag && i + 1 < argc) return argv[i + 1];
    if (word.starts_with(flag + "=")) return word.substr(flag.size() + 1);
  }
  return "";
}

// Columns of this replica, [rows, batch_size / replicas] each.
struct Data {
  at::Tensor train, valid, test;
  int64_t vocab = 0;
};

std::optional<int> parse(int argc, char** argv, Settings& settings) {
  if (preset_in(argc, argv) == "tutorial") use_tutorial(settings);
  examples::FlagParser parser("Trains a transformer language model.", settings.common);
  parser.add("--bptt", settings.bptt, "Tokens per row of a batch");
  parser.add("--width", settings.model.width, "Width of the model");
  parser.add("--heads", settings.model.heads, "Heads of each attention");
  parser.add("--hidden", settings.model.hidden, "Width of each feed-forward block");
  parser.add("--layers", settings.model.layers, "Encoder layers");
  parser.add("--dropout", settings.model.dropout, "Probability of dropout");
  parser.add("--print-every", settings.print_every, "Steps between lines of progress; 0: none",
             /*minimum=*/0);
  parser.add("--save", settings.save, "Write the best weights to this file, for torch::load");
  parser.add("--preset", settings.preset, "small or tutorial: what the other flags are without being given");
  parser.add("--min-vocab", settings.min_vocab, "Rows of the embedding, if the text has fewer words");
  parser.add("--delayed", settings.is_delayed, "Construct without values; each process makes those of its part");
  parser.add("--no-evaluation", settings.skips_evaluation, "Only train: neither validation nor test, nothing saved");
  if (const auto exit_code = parser.parse(argc, argv)) return exit_code;
  if (settings.preset == "small" || settings.preset == "tutorial") return std::nullopt;
  std::fprintf(stderr, "--preset: expected small|tutorial, got %s\n", settings.preset.c_str());
  return 2;
}

Data load(const Settings& settings) {
  const int64_t batch_size = settings.common.batch_size;
  const int64_t rows = examples::rows_per_replica(batch_size);
  const Text text = read_text(settings.common.data);
  const Vocabulary vocabulary(text.train);
  const auto columns = [&](const std::string& split) {
    return batchify(vocabulary.encode(split), batch_size).narrow(1, smp::dp_rank() * rows, rows);
  };
  return {columns(text.train), columns(text.valid), columns(text.test), vocabulary.size()};
}

class Training {
 public:
  /// `memory`: made before `net`.
  Training(const Settings& settings, const Data& data, StepMemory& memory, std::shared_ptr<TransformerLm> net)
      : settings_(settings),
        data_(data),
        memory_(memory),
        model_(std::move(net)),
        log_(settings.common.log, smp::rank() == 0) {}

  /// From the first step to the test perplexity.
  template <class Optimizer>
  void run(Optimizer plain) {
    smp::DistributedOptimizer optimizer(std::move(plain), model_);
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.95);
    LossStep train_step = smp::step([&](at::Tensor input, at::Tensor target) {
      auto loss = token_loss(model_(input), target);
      model_.backward(loss);
      return loss;
    });
    LossStep loss_step = smp::step([&](at::Tensor input, at::Tensor target) { return token_loss(model_(input), target); });
    for (epoch_ = 1; epoch_ <= settings_.common.epochs && !is_over(); ++epoch_) {
      const int64_t batches = num_batches(data_.train, settings_.bptt);
      for (batch_ = 1; batch_ <= batches && !is_over(); ++batch_) {
        const Batch batch = get_batch(data_.train, batch_ - 1, settings_.bptt);
        const double start = examples::seconds_now();
        optimizer.zero_grad();
        const smp::StepOutput losses = train_step(batch.data, batch.target);
        if (batch.data.size(1) == full_length()) measured_.push_back(examples::seconds_now() - start);
        smp::clip_grad_norm_(model_, 0.5);
        optimizer.step();
        note_step(losses, batch.data.size(1), examples::seconds_now() - start,
                  optimizer.get().param_groups()[0].options().get_lr());
      }
      if (epoch_ == 1) memory_.finish();
      scheduler.step();
      if (!settings_.skips_evaluation) keep_best(evaluate(model_, loss_step, data_.valid, settings_.bptt));
    }
    finish(settings_.skips_evaluation ? std::nullopt : std::optional(evaluate_best(loss_step)));
  }

 private:
  bool is_over() const { return settings_.common.steps > 0 && step_ >= settings_.common.steps; }

  // Tokens per row of every batch but the last of an epoch, which may be shorter.
  int64_t full_length() const { return std::min(settings_.bptt, data_.train.size(0) - 1); }

  void note_step(const smp::StepOutput& losses, int64_t length, double step_s, double lr) {
    const double loss = smp::all_reduce_mean(losses.reduce_mean(), smp::CommGroup::DP_GROUP).item<double>();
    const auto tokens = static_cast<double>(settings_.common.batch_size * length);
    if (++step_ == 1) log_.start(smp::config().to_json(), model_.plan_json());
    memory_.after_step(step_);
    log_.step({.step = step_, .loss = loss, .step_s = step_s, .figures = {{"tokens_per_s", tokens / step_s}}});
    since_line_.push_back({loss, step_s, tokens});
    if (settings_.print_every > 0 && step_ % settings_.print_every == 0) print_line(lr);
  }

  void print_line(double lr) {
    double loss = 0, time_s = 0, tokens = 0;
    for (const auto& step : since_line_) loss += step.loss, time_s += step.step_s, tokens += step.tokens;
    const auto steps = static_cast<double>(since_line_.size());
    since_line_.clear();
    if (smp::rank() != 0) return;
    print_progress({.epoch = epoch_,
                    .batch = batch_,
                    .batches = num_batches(data_.train, settings_.bptt),
                    .lr = lr,
                    .mean_loss = loss / steps,
                    .step_s = time_s / steps,
                    .tokens_per_s = tokens / time_s});
  }

  void keep_best(double valid_loss) {
    if (smp::rank() == 0) {
      std::printf("epoch %3ld | valid loss %.3f | valid perplexity %.1f\n", epoch_, valid_loss, std::exp(valid_loss));
    }
    best_.offer(valid_loss, model_.local_named_parameters());
  }

  double evaluate_best(LossStep& loss_step) {
    if (!best_.is_empty()) {
      best_.restore(model_.local_named_parameters());
      save();
    } else if (smp::rank() == 0) {
      std::printf(
          "no epoch had a finite validation loss: nothing is saved, and the test is of the last weights. Lower --lr.\n");
    }
    return evaluate(model_, loss_step, data_.test, settings_.bptt);
  }

  // Gathers the model: for --save only, since a whole model may fit on no single rank.
  void save() {
    if (settings_.save.empty()) return;
    const smp::StateDict state = model_.state_dict();
    if (smp::rank() == 0) torch::save(state, settings_.save);
  }

  void finish(std::optional<double> test_loss) {
    if (measured_.size() > 1) measured_.erase(measured_.begin());  // the first step captures and plans
    const Outcome outcome{.predicted_step_s = model_.predicted_step_s(),
                          .measured_step_s = median(measured_),
                          .predicted_peak_bytes = model_.predicted_peak_bytes(),
                          .tensor_peak_bytes = gather(static_cast<double>(memory_.tensor_bytes())),
                          .resident_peak_bytes = gather(static_cast<double>(memory_.resident_bytes())),
                          .pipeline_ranks = gather(smp::pp_rank())};
    if (smp::rank() != 0) return;
    auto summary = summary_of(outcome);
    if (test_loss) {
      std::printf("%s weights | test loss %.3f | test perplexity %.1f\n", best_.is_empty() ? "last" : "best", *test_loss,
                  std::exp(*test_loss));
      summary.insert(summary.begin(),
                     {{"valid_loss", best_.loss()}, {"test_loss", *test_loss}, {"test_perplexity", std::exp(*test_loss)}});
    }
    print_outcome(outcome);
    log_.finish(summary);
  }

  struct Step {
    double loss, step_s, tokens;
  };

  Settings settings_;
  Data data_;
  StepMemory& memory_;
  Model model_;
  examples::StepLog log_;
  int64_t epoch_ = 0, batch_ = 0, step_ = 0;
  std::vector<Step> since_line_;
  std::vector<double> measured_;  // seconds of each full step, without clipping and optimizer
  BestWeights best_;
};

void train(Settings settings) {
  const Data data = load(settings);
  StepMemory memory(/*counts_first_step=*/settings.is_delayed);
  settings.model.vocab = std::max(data.vocab, settings.min_vocab);
  settings.model.max_tokens = settings.bptt;
  torch::manual_seed(settings.common.seed);
  std::shared_ptr<TransformerLm> net;
  {
    const smp::DelayParamInitialization delay(settings.is_delayed);
    net = std::make_shared<TransformerLm>(settings.model);
  }
  if (settings.common.partition == examples::Partition::kManual) place_by_hand(*net, smp::pp_size());
  Training training(settings, data, memory, net);
  examples::with_optimizer(settings.common, [&](auto make) { training.run(make(net->parameters())); });
}

}  // namespace
}  // namespace transformer_lm

int main(int argc, char** argv) {
  transformer_lm::Settings settings;
  if (const auto exit_code = transformer_lm::parse(argc, argv, settings)) return *exit_code;
  smp::init(settings.common.config());
  transformer_lm::train(settings);
  smp::shutdown();
}
