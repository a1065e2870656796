// Trains a network to read handwritten digits, over all processes that the launcher has started.
//
//   mnist                                   one process
//   smp run -np 2 mnist --partition manual  two, with the layers placed by hand
#include <torch/torch.h>

#include <cstdio>
#include <optional>

#include "examples/common/clock.h"
#include "examples/common/flags.h"
#include "examples/common/optimizers.h"
#include "examples/common/replicas.h"
#include "examples/common/step_log.h"
#include "examples/mnist/batches.h"
#include "examples/mnist/evaluation.h"
#include "examples/mnist/idx.h"
#include "examples/mnist/model.h"
#include "examples/mnist/placement.h"
#include "smp/smp.h"

namespace mnist {
namespace {

struct Settings {
  examples::Flags common{
      .epochs = 8, .batch_size = 32, .optimizer = examples::Optimizer::kAdam, .lr = 0.003, .data = SMP_DIGITS};
  ConvNetOptions model;
};

std::optional<int> parse(int argc, char** argv, Settings& settings) {
  examples::FlagParser parser("Trains a network to read handwritten digits.", settings.common);
  parser.add("--channels-1", settings.model.channels_1, "Channels of the first convolution");
  parser.add("--channels-2", settings.model.channels_2, "Channels of the second convolution");
  parser.add("--hidden", settings.model.hidden, "Width of the layer before the last");
  return parser.parse(argc, argv);
}

class Training {
 public:
  Training(const Settings& settings, const Digits& digits, std::shared_ptr<ConvNet> net)
      : flags_(settings.common),
        digits_(digits),
        rows_(examples::rows_per_replica(flags_.batch_size)),
        model_(std::move(net)),
        evaluation_(model_, digits_.test, flags_.batch_size),
        log_(flags_.log, smp::rank() == 0) {
    TORCH_CHECK_VALUE(num_batches() > 0, "--batch-size: expected at most the ", digits_.train.size(), " training images of ",
                      flags_.data, ", got ", flags_.batch_size, ".");
  }

  /// From the first step to the last test.
  template <class Optimizer>
  void run(Optimizer plain) {
    smp::DistributedOptimizer optimizer(std::move(plain), model_);
    torch::optim::StepLR scheduler(optimizer, /*step_size=*/1, /*gamma=*/0.8);
    auto train_step = smp::step([&](at::Tensor images, at::Tensor labels) {
      auto loss = torch::nll_loss(model_(images), labels);
      model_.backward(loss);
      return loss;
    });
    TestResult result;
    for (int64_t epoch = 1; epoch <= flags_.epochs && !is_over(); ++epoch) {
      const at::Tensor order = shuffled(digits_.train.size(), flags_.seed + epoch);
      for (int64_t i = 0; i < num_batches() && !is_over(); ++i) {
        const Batch batch = get_batch(digits_.train, order, i * flags_.batch_size + smp::dp_rank() * rows_, rows_);
        const double start = examples::seconds_now();
        optimizer.zero_grad();
        const smp::StepOutput losses = train_step(batch.images, batch.labels);
        optimizer.step();
        note_step(losses, examples::seconds_now() - start);
      }
      scheduler.step();
      result = evaluation_.run();
      print_epoch(epoch, result);
    }
    finish(result);
  }

 private:
  bool is_over() const { return flags_.steps > 0 && step_ >= flags_.steps; }
  // What an epoch leaves over is in another batch of the next.
  int64_t num_batches() const { return digits_.train.size() / flags_.batch_size; }

  void note_step(const smp::StepOutput& losses, double step_s) {
    const double loss = smp::all_reduce_mean(losses.reduce_mean(), smp::DP_GROUP).item<double>();
    if (++step_ == 1) log_.start(smp::config().to_json(), model_.plan_json());
    const double images_per_s = static_cast<double>(flags_.batch_size) / step_s;
    log_.step({.step = step_, .loss = loss, .step_s = step_s, .figures = {{"images_per_s", images_per_s}}});
    epoch_loss_ += loss;
    ++epoch_steps_;
  }

  void print_epoch(int64_t epoch, const TestResult& result) {
    if (smp::rank() == 0) {
      std::printf("epoch %2ld | loss %.4f | test loss %.4f | test accuracy %.1f %%\n", epoch,
                  epoch_loss_ / static_cast<double>(epoch_steps_), result.loss, 100 * result.accuracy());
      std::fflush(stdout);
    }
    epoch_loss_ = 0, epoch_steps_ = 0;
  }

  void finish(const TestResult& result) {
    if (smp::rank() != 0) return;
    std::printf("%ld of %ld test images are read rightly, %.1f %%\n", result.correct, result.total, 100 * result.accuracy());
    log_.finish({{"test_loss", result.loss}, {"test_accuracy", result.accuracy()}});
  }

  examples::Flags flags_;
  const Digits& digits_;
  int64_t rows_;  // of a batch, for this replica
  Model model_;
  Evaluation evaluation_;
  examples::StepLog log_;
  int64_t step_ = 0;
  double epoch_loss_ = 0;
  int64_t epoch_steps_ = 0;
};

void train(Settings settings) {
  const Digits digits = read_digits(settings.common.data);
  settings.model.rows = digits.train.pixels.size(1);
  settings.model.columns = digits.train.pixels.size(2);
  torch::manual_seed(settings.common.seed);
  auto net = std::make_shared<ConvNet>(settings.model);
  if (settings.common.partition == examples::Partition::kManual) place_by_hand(*net, smp::pp_size());
  Training training(settings, digits, net);
  examples::with_optimizer(settings.common, [&](auto make) { training.run(make(net->parameters())); });
}

}  // namespace
}  // namespace mnist

int main(int argc, char** argv) {
  mnist::Settings settings;
  if (const auto exit_code = mnist::parse(argc, argv, settings)) return *exit_code;
  smp::init(settings.common.config());
  mnist::train(settings);
  smp::shutdown();
}
