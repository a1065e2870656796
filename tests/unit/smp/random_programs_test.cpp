// Random programs of unusual parts through smp: the bits of a plain loop over the microbatches, or a refusal that names
// the place and a way out.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <mutex>

#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/messages.h"
#include "tests/support/random_program.h"
#include "tests/support/smp_ranks.h"

namespace smp {
namespace {

using support::contains;
using support::Program;
using support::ProgramNet;

constexpr uint64_t kWeightSeed = 7;
constexpr double kLearningRate = 0.05;

/// What a training run leaves behind, up to the step that threw.
struct Training {
  std::vector<std::map<std::string, at::Tensor>> steps;  // losses, outputs, parameters and buffers after each step
  std::string error;                                     // of the step behind the last one, without backtrace
};

std::string text_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

Training train_plainly(const Program& program, int microbatches) {
  const auto net = std::make_shared<ProgramNet>(program, kWeightSeed);
  torch::optim::SGD optimizer(net->parameters(), kLearningRate);
  Training training;
  try {
    for (int s = 0; s < support::kProgramSteps; ++s) {
      const auto whole = support::program_arguments(program, s, microbatches);
      std::map<std::string, at::Tensor> after;
      optimizer.zero_grad();
      for (int m = 0; m < microbatches; ++m) {
        const auto results =
            support::run_body(program,
                              {*net, [&](const auto& arguments) { return net->forward(arguments); },
                               [&](const at::Tensor& loss) { loss.div(microbatches).backward({}, /*retain_graph=*/true); }},
                              support::program_microbatch(program, whole, m));
        after["loss of microbatch " + std::to_string(m)] = results[0].clone();
        after["output of microbatch " + std::to_string(m)] = results[1].clone();
      }
      optimizer.step();
      for (const auto& entry : net->named_parameters()) after[entry.key()] = entry.value().detach().clone();
      for (const auto& entry : net->named_buffers()) after[entry.key()] = entry.value().clone();
      training.steps.push_back(std::move(after));
    }
  } catch (const std::exception& error) {
    training.error = text_of(error);
  }
  return training;
}

/// As pp_rank 0 sees it.
Training train_by_smp(const Program& program, int ranks, const Config& config) {
  Training training;
  try {
    tests::run_smp_ranks(ranks, config, [&] {
      const auto net = std::make_shared<ProgramNet>(program, kWeightSeed);
      DistributedModel model(net);
      DistributedOptimizer optimizer(torch::optim::SGD(net->parameters(), kLearningRate), model);
      auto step = smp::step([&](const std::vector<at::Tensor>& arguments) {
        return support::run_body(program,
                                 {*net, [&](const auto& tensors) { return model(tensors); },
                                  [&](const at::Tensor& loss) { model.backward(loss); }},
                                 arguments);
      });
      for (int s = 0; s < support::kProgramSteps; ++s) {
        optimizer.zero_grad();
        const std::vector<StepOutput> results =
            step(support::program_arguments(program, s, static_cast<int>(config.microbatches)));
        optimizer.step();
        const StateDict state = model.state_dict();
        if (pp_rank() != 0) continue;
        auto& after = training.steps.emplace_back();
        for (int64_t m = 0; m < config.microbatches; ++m) {
          after["loss of microbatch " + std::to_string(m)] = results[0][m];
          after["output of microbatch " + std::to_string(m)] = results[1][m];
        }
        for (const auto& entry : state.entries) after[entry.name] = entry.tensor.detach().clone();
      }
    });
  } catch (const std::exception& error) {
    training.error = text_of(error);
  }
  return training;
}

/// The first difference in the steps that both have run; "" where there is none.
std::string difference(const Training& got, const Training& want) {
  for (size_t s = 0; s < std::min(got.steps.size(), want.steps.size()); ++s) {
    for (const auto& [name, tensor] : want.steps[s]) {
      const auto found = got.steps[s].find(name);
      const std::string text = found == got.steps[s].end() ? "missing" : support::bit_difference(found->second, tensor);
      if (!text.empty()) return "step " + std::to_string(s) + ", " + name + ": " + text;
    }
  }
  return "";
}

bool contains_one_of(const std::string& text, const std::vector<std::string>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](const std::string& part) { return contains(text, part); });
}

/// A text of ours says where, and what to do.
bool names_place_and_way_out(const std::string& text) {
  return contains_one_of(text, {"in or after module", "before any parameter", "step body", "argument", "aten::", "'"}) &&
         contains_one_of(text, {"Call ", "Clear ", "Compute ", "Fill ", "Give ", "Hook ", "Make ", "Register ", "To carry",
                                "Train ", "Use ", "Write ", "pass a clone()"}) &&
         !contains(text, "INTERNAL ASSERT");
}

TEST(RandomPrograms, EqualAPlainLoopOrAreRefused) {
  constexpr uint64_t kNumPrograms = 1000;
  at::set_num_threads(1);
  int num_equal = 0, num_refused = 0, num_thrown_alike = 0;
  std::map<std::string, std::vector<uint64_t>> refusals;  // by text behind the place: the seeds
  for (uint64_t seed = 0; seed < kNumPrograms; ++seed) {
    const Program program = support::random_program(seed);
    const int ranks = 1 + static_cast<int>(seed % 4);
    const Config config{.microbatches = 1 + static_cast<int64_t>(seed / 4 % 3),
                        .pipeline = seed / 12 % 4 == 0 ? Pipeline::kSimple : Pipeline::kInterleaved,
                        .stage = seed / 3 % 4 == 0 ? StageKind::kAutograd : StageKind::kTape,
                        .exact_tied_weights = true,
                        .nonfinite = Nonfinite::kIgnore,
                        .timeout_s = 60};
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " ranks, " +
                 std::to_string(config.microbatches) + " microbatches: " + program.describe());
    const Training want = train_plainly(program, static_cast<int>(config.microbatches));
    const Training got = train_by_smp(program, ranks, config);
    const std::string differs = difference(got, want);
    EXPECT_EQ(differs, "");
    if (!differs.empty()) continue;
    if (!want.error.empty()) {
      EXPECT_FALSE(got.error.empty()) << "smp goes on where LibTorch throws: " << want.error;
      EXPECT_FALSE(contains(got.error, "INTERNAL ASSERT")) << got.error;
      ++num_thrown_alike;
    } else if (!got.error.empty()) {
      EXPECT_TRUE(names_place_and_way_out(got.error)) << got.error;
      ++num_refused;
      refusals[got.error.substr(got.error.find(": ") + 2, 120)].push_back(seed);
    } else {
      ++num_equal;
    }
  }
  std::cout << num_equal << " equal, " << num_thrown_alike << " throw in a plain loop and here, " << num_refused
            << " refused:\n";
  for (const auto& [text, seeds] : refusals)
    std::cout << "  " << seeds.size() << " (seed " << seeds.front() << "): " << text << '\n';
  EXPECT_GE(num_equal, static_cast<int>(kNumPrograms) * 2 / 5);  // and one tenth throws in a plain loop
}

}  // namespace
}  // namespace smp
