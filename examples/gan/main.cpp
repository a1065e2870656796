// Trains a generator and a discriminator against each other, over all processes that the launcher has started.
//
//   gan                                   one process
//   smp run -np 2 gan --partition manual  two: the generator on the first, the discriminator on the
//   second
#include <torch/torch.h>

#include <cstdio>
#include <optional>

#include "examples/common/clock.h"
#include "examples/common/flags.h"
#include "examples/common/optimizers.h"
#include "examples/common/replicas.h"
#include "examples/common/step_log.h"
#include "examples/gan/model.h"
#include "examples/gan/ring.h"
#include "smp/smp.h"

namespace gan {
namespace {

struct Settings {
  examples::Flags common{
      .steps = 1500, .batch_size = 256, .microbatches = 2, .optimizer = examples::Optimizer::kAdam, .lr = 0.002};
  int64_t noise = 8;
  int64_t hidden = 64;
  int64_t print_every = 250;
};

std::optional<int> parse(int argc, char** argv, Settings& settings) {
  examples::FlagParser parser("Trains a generator and a discriminator on a ring of Gaussians.", settings.common,
                              examples::DataSource::kDrawn);
  parser.add("--noise", settings.noise, "Numbers that the generator makes a point of");
  parser.add("--hidden", settings.hidden, "Width of the layers");
  parser.add("--print-every", settings.print_every, "Steps between lines of progress; 0: none",
             /*minimum=*/0);
  return parser.parse(argc, argv);
}

struct Networks {
  std::shared_ptr<Generator> generator;
  std::shared_ptr<Discriminator> discriminator;
};

Networks build(const Settings& settings) {
  torch::manual_seed(settings.common.seed);
  const auto generator = [&] { return std::make_shared<Generator>(settings.noise, settings.hidden); };
  const auto discriminator = [&] { return std::make_shared<Discriminator>(settings.hidden); };
  if (settings.common.partition == examples::Partition::kAuto) return {generator(), discriminator()};
  Networks networks;
  {
    smp::PartitionGuard on_first(0);
    networks.generator = generator();
  }
  smp::PartitionGuard on_last(smp::pp_size() - 1);
  networks.discriminator = discriminator();
  return networks;
}

class Training {
 public:
  Training(const Settings& settings, const Networks& networks)
      : settings_(settings),
        rows_(examples::rows_per_replica(settings.common.batch_size)),
        random_(at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(settings.common.seed))),
        generator_(networks.generator, {.name = "generator"}),
        discriminator_(networks.discriminator, {.name = "discriminator"}),
        log_(settings.common.log, smp::rank() == 0) {}

  /// From the first step to the last count of modes.
  template <class Optimizer>
  void run(Optimizer of_generator, Optimizer of_discriminator) {
    smp::DistributedOptimizer generator_optimizer(std::move(of_generator), generator_);
    smp::DistributedOptimizer discriminator_optimizer(std::move(of_discriminator), discriminator_);
    auto discriminator_step = smp::step([&](at::Tensor real, at::Tensor noise) {
      // One call for both. Of two, the plan may put each on a stage of its own, with a copy of the
      // weights, and copies add up their gradients in another order than one process does.
      auto logits = discriminator_(torch::cat({real, generator_(noise).detach()})).chunk(2);
      auto loss = torch::softplus(-logits[0]).mean() + torch::softplus(logits[1]).mean();
      discriminator_.backward(loss);
      return loss;
    });
    auto generator_step = smp::step([&](at::Tensor noise) {
      auto loss = torch::softplus(-discriminator_(generator_(noise))).mean();
      generator_.backward(loss);
      return loss;
    });
    auto sample = smp::step([&](at::Tensor noise) { return generator_(noise); });

    for (int64_t step = 1; step <= settings_.common.steps; ++step) {
      const at::Tensor real = my_rows(draw_ring(settings_.common.batch_size, random_));
      const at::Tensor noise = my_rows(draw_noise()), more_noise = my_rows(draw_noise());
      const double start = examples::seconds_now();
      discriminator_optimizer.zero_grad();  // of the generator's step too, whose loss reaches the discriminator
      const smp::StepOutput discriminator_loss = discriminator_step(real, noise);
      discriminator_optimizer.step();
      generator_optimizer.zero_grad();
      const smp::StepOutput generator_loss = generator_step(more_noise);
      generator_optimizer.step();
      note_step(step, discriminator_loss, generator_loss, examples::seconds_now() - start);
      if (settings_.print_every > 0 && step % settings_.print_every == 0) print_line(step, cover(sample));
    }
    finish(cover(sample));
  }

 private:
  at::Tensor draw_noise() { return torch::randn({settings_.common.batch_size, settings_.noise}, random_); }
  at::Tensor my_rows(const at::Tensor& batch) const { return batch.narrow(0, smp::dp_rank() * rows_, rows_); }

  /// Of points that are drawn alike each time.
  template <class SampleStep>
  Coverage cover(SampleStep& sample) {
    constexpr int64_t kPointsPerMicrobatch = 1000;
    const torch::NoGradGuard no_grad;
    auto same = at::make_generator<at::CPUGeneratorImpl>(0);
    return coverage_of(
        sample(torch::randn({settings_.common.microbatches * kPointsPerMicrobatch, settings_.noise}, same)).concat());
  }

  void note_step(int64_t step, const smp::StepOutput& discriminator_loss, const smp::StepOutput& generator_loss,
                 double step_s) {
    const auto mean = [](const smp::StepOutput& loss) {
      return smp::all_reduce_mean(loss.reduce_mean(), smp::DP_GROUP).item<double>();
    };
    discriminator_loss_ = mean(discriminator_loss);
    generator_loss_ = mean(generator_loss);
    if (step == 1) log_.start(smp::config().to_json(), discriminator_.plan_json());
    log_.step({.step = step,
               .loss = discriminator_loss_,
               .step_s = step_s,
               .figures = {{"generator_loss", generator_loss_},
                           {"points_per_s", static_cast<double>(settings_.common.batch_size) / step_s}}});
  }

  void print_line(int64_t step, const Coverage& coverage) {
    if (smp::rank() != 0) return;
    std::printf("step %5ld | discriminator loss %.4f | generator loss %.4f | modes %ld of %ld | near one %.0f %%\n", step,
                discriminator_loss_, generator_loss_, coverage.modes, kNumModes, 100 * coverage.near_mode);
    std::fflush(stdout);
  }

  void finish(const Coverage& coverage) {
    if (smp::rank() != 0) return;
    std::printf("%ld of %ld modes are covered, %.0f %% of the points are near one\n", coverage.modes, kNumModes,
                100 * coverage.near_mode);
    log_.finish({{"modes", static_cast<double>(coverage.modes)}, {"near_mode", coverage.near_mode}});
  }

  Settings settings_;
  int64_t rows_;  // of a batch, for this replica
  at::Generator random_;
  smp::DistributedModel<Generator> generator_;
  smp::DistributedModel<Discriminator> discriminator_;
  examples::StepLog log_;
  double discriminator_loss_ = 0, generator_loss_ = 0;
};

}  // namespace
}  // namespace gan

int main(int argc, char** argv) {
  gan::Settings settings;
  if (const auto exit_code = gan::parse(argc, argv, settings)) return *exit_code;
  smp::init(settings.common.config());
  const gan::Networks networks = gan::build(settings);
  gan::Training training(settings, networks);
  examples::with_optimizer(
      settings.common,
      [&](auto make) { training.run(make(networks.generator->parameters()), make(networks.discriminator->parameters())); },
      {.adam_beta1 = 0.5});
  smp::shutdown();
}
