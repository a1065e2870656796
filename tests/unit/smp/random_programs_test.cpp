// Random programs of unusual parts through smp: the bits of a plain loop over the microbatches, or a refusal that names
// the place and a way out.
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <map>
#include <mutex>

#include "runtime/device/device.h"
#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/long_form.h"
#include "tests/support/messages.h"
#include "tests/support/random_program.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

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
  bool replays = false;                                  // graphs of the device, on a stage of this rank
};

std::string text_of(const std::exception& error) {
  const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
  return of_torch ? of_torch->what_without_backtrace() : error.what();
}

/// As it is now, for another thread.
at::Tensor kept(const at::Tensor& tensor) {
  return tensor.detach().to(at::kCPU, tensor.scalar_type(), false, /*copy=*/true);
}

torch::optim::SGD optimizer_of(const Program& program, const ProgramNet& net) {
  return torch::optim::SGD(net.parameters(),
                           torch::optim::SGDOptions(kLearningRate).momentum(program.has_momentum ? 0.5 : 0));
}

bool begins_anew(const Program& program, int step) { return !program.accumulates || step % 2 == 0; }
bool evaluates_behind(const Program& program, int step) { return program.evaluates && step % 3 == 2; }

std::string name_of(const char* what, int64_t microbatch) { return what + (" of microbatch " + std::to_string(microbatch)); }

Training train_plainly(const Program& program, int64_t microbatches) {
  // LibTorch's threads, one for each device, would add up gradients in the order in which they come.
  c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  const at::Device device = runtime::this_ranks_device().current();
  const auto net = std::make_shared<ProgramNet>(program, kWeightSeed, device);
  torch::optim::SGD optimizer = optimizer_of(program, *net);
  const support::ProgramRun run{*net, [&](const auto& arguments) { return net->forward(arguments); },
                                [&](const at::Tensor& loss) { loss.div(microbatches).backward({}, /*retain_graph=*/true); }};
  Training training;
  try {
    for (int s = 0; s < support::kProgramSteps; ++s) {
      const auto whole = support::program_arguments(program, s, microbatches, device);
      std::map<std::string, at::Tensor> after;
      if (begins_anew(program, s)) optimizer.zero_grad();
      for (int64_t m = 0; m < microbatches; ++m) {
        const auto results = support::run_body(program, run, support::program_microbatch(program, whole, m, microbatches));
        after[name_of("loss", m)] = kept(results[0]);
        after[name_of("output", m)] = kept(results[1]);
      }
      optimizer.step();
      if (evaluates_behind(program, s)) {
        net->eval();
        for (int64_t m = 0; m < microbatches; ++m) {
          const auto results = support::evaluate_body(run, support::program_microbatch(program, whole, m, microbatches));
          after[name_of("evaluated loss", m)] = kept(results[0]);
          after[name_of("evaluated output", m)] = kept(results[1]);
        }
        net->train();
      }
      for (const auto& entry : net->named_parameters()) after[entry.key()] = kept(entry.value());
      for (const auto& entry : net->named_buffers()) after[entry.key()] = kept(entry.value());
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
      DistributedOptimizer optimizer(optimizer_of(program, *net), model);
      const support::ProgramRun run{*net, [&](const auto& tensors) { return model(tensors); },
                                    [&](const at::Tensor& loss) { model.backward(loss); }};
      auto step =
          smp::step([&](const std::vector<at::Tensor>& arguments) { return support::run_body(program, run, arguments); });
      auto evaluation =
          smp::step([&](const std::vector<at::Tensor>& arguments) { return support::evaluate_body(run, arguments); });
      const at::Device device = program.arguments_on_host ? at::kCPU : runtime::this_ranks_device().current();
      for (int s = 0; s < support::kProgramSteps; ++s) {
        std::map<std::string, at::Tensor> after;
        const auto keep = [&](const std::vector<StepOutput>& results, const char* loss, const char* output) {
          for (int64_t m = 0; m < config.microbatches; ++m) {
            after[name_of(loss, m)] = kept(results[0][m]);
            after[name_of(output, m)] = kept(results[1][m]);
          }
        };
        const auto arguments = support::program_arguments(program, s, config.microbatches, device);
        if (begins_anew(program, s)) optimizer.zero_grad();
        keep(step(arguments), "loss", "output");
        optimizer.step();
        if (evaluates_behind(program, s)) {
          model.eval();
          keep(evaluation(arguments), "evaluated loss", "evaluated output");
          model.train();
        }
        for (const auto& entry : model.state_dict().entries) after[entry.name] = kept(entry.tensor);
        if (pp_rank() == 0) training.steps.push_back(std::move(after));
      }
      const auto reports = support::stage_reports();
      const bool replays =
          std::any_of(reports.begin(), reports.end(), [](const auto& report) { return report.num_replayed > 0; });
      if (pp_rank() == 0) training.replays = replays;
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
  return contains_one_of(text, {"in or after module", "before any parameter", "backward: ", "step: ", "step body",
                                "argument", "aten::", "'"}) &&
         contains_one_of(text, {"Call ", "Clear ", "Compute ", "Evaluate ", "Fill ", "Give ", "Hook ", "Leave ", "Make ",
                                "Move ", "Multiply ", "Register ", "To carry", "Train ", "Use ", "Write ",
                                "compute it inside the body", "pass a clone()", "register it"}) &&
         !contains(text, "INTERNAL ASSERT");
}

TEST(RandomPrograms, EqualAPlainLoopOrAreRefused) {
  const bool is_on_gpu = runtime::this_ranks_device().type != runtime::host().type;
  const auto num_programs = static_cast<uint64_t>(support::num_random(is_on_gpu ? 500 : 1000));
  at::set_num_threads(1);
  int num_equal = 0, num_refused = 0, num_thrown_alike = 0, num_replayed = 0;
  std::map<std::string, std::vector<uint64_t>> refusals;  // by text behind the place: the seeds
  for (uint64_t seed = 0; seed < num_programs; ++seed) {
    const Program program = support::random_program(seed);
    const int ranks = 1 + static_cast<int>(seed % 4);
    const Config config{.microbatches = 1 + static_cast<int64_t>(seed / 4 % 3),
                        .pipeline = seed / 12 % 4 == 0 ? Pipeline::kSimple : Pipeline::kInterleaved,
                        .stage = seed / 3 % 4 == 0 ? StageKind::kAutograd : StageKind::kTape,
                        .cuda_graphs = seed / 5 % 4 == 0 ? CudaGraphs::kOff : CudaGraphs::kAuto,
                        .nonfinite = Nonfinite::kIgnore,
                        .timeout_s = 60};
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + std::to_string(ranks) + " ranks, " +
                 std::to_string(config.microbatches) + " microbatches: " + program.describe());
    const Training want = train_plainly(program, config.microbatches);
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
      if (got.replays) ++num_replayed;
    }
  }
  std::cout << num_equal << " equal, " << num_thrown_alike << " throw in a plain loop and here, " << num_refused
            << " refused, " << num_replayed << " of the equal ones from CUDA graphs:\n";
  for (const auto& [text, seeds] : refusals)
    std::cout << "  " << seeds.size() << " (seed " << seeds.front() << "): " << text << '\n';
  EXPECT_GE(num_equal, static_cast<int>(num_programs) * 2 / 5);  // and one tenth throws in a plain loop
  EXPECT_GE(num_replayed, is_on_gpu ? static_cast<int>(num_programs) / 20 : 0);
}

}  // namespace
}  // namespace smp
