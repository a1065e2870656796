// Errors that depend on numbers: a taped stage throws what autograd throws, whoever uses the results.
#include "tests/support/split_run.h"
#include "tests/unit/smp/plain_loop.h"

namespace smp {
namespace {

struct Arguments {
  at::Tensor output;    // [2, 4]
  at::Tensor matrices;  // [2, 3, 3]
  at::Tensor indices;   // [2]
};

/// Part of a step body, whose result nobody needs.
struct Thrower {
  std::string name, text;
  std::function<at::Tensor(const Arguments&)> call;
  bool is_used;  // by the loss
};

void PrintTo(const Thrower& thrower, std::ostream* out) { *out << thrower.name; }

std::vector<Thrower> throwers() {
  std::vector<Thrower> all;
  for (const bool is_used : {true, false}) {
    const auto add = [&](const std::string& name, const std::string& text,
                         std::function<at::Tensor(const Arguments&)> call) {
      all.push_back({name + (is_used ? "Used" : "Unused"), text, std::move(call), is_used});
    };
    add("Inverse", "singular", [](const Arguments& a) { return at::linalg_inv(a.matrices); });
    add("Cholesky", "positive-definite", [](const Arguments& a) { return at::linalg_cholesky(a.matrices); });
    add("Solution", "singular", [](const Arguments& a) { return at::linalg_solve(a.matrices, at::ones({2, 3, 1})); });
    add("Row", "out of range", [](const Arguments& a) { return a.output.index_select(0, a.indices); });
    add("Number", "out of bounds", [](const Arguments& a) { return a.output.gather(1, a.indices.view({2, 1})); });
    add("Quotient", "ZeroDivisionError",
        [](const Arguments& a) { return at::div(a.indices * 0 + 7, 1 - a.indices, "floor").to(at::kFloat); });
  }
  return all;
}

class TapeErrors : public testing::TestWithParam<Thrower> {
 protected:
  /// The error of the last of several steps, the only one with numbers that do not do.
  static std::string error_of_last(StageKind kind, bool trains) {
    std::string text;
    tests::run_smp_ranks(1, {.microbatches = 2, .stage = kind, .log_level = LogLevel::kOff}, [&] {
      const auto net = tests::make_net();
      DistributedModel model(net);
      at::AutoGradMode mode(trains);
      auto step = smp::step([&](at::Tensor data, at::Tensor matrices, at::Tensor indices) {
        const at::Tensor output = model(data), made = GetParam().call({output, matrices, indices});
        const at::Tensor loss = output.square().mean() + (GetParam().is_used ? made.sum() : at::zeros({}));
        if (trains) model.backward(loss);
        return loss;
      });
      const at::Tensor data = tests::rows(4, 8, 1), matrices = at::eye(3).repeat({4, 1, 1}),
                       indices = at::zeros({4}, at::kLong);
      for (int s = 0; s < support::kStepsToTape; ++s) step(data, matrices, indices);
      for (const auto& report : support::stage_reports()) EXPECT_EQ(report.num_taped > 0, kind == StageKind::kTape);
      matrices[2].zero_();
      indices[3] = GetParam().name.starts_with("Quotient") ? 1 : 9;
      text = support::message_of([&] { step(data, matrices, indices); });
    });
    return text;
  }
};
INSTANTIATE_TEST_SUITE_P(All, TapeErrors, testing::ValuesIn(throwers()),
                         [](const testing::TestParamInfo<Thrower>& test) { return test.param.name; });

TEST_P(TapeErrors, AreThoseOfAutograd) {
  for (const bool trains : {true, false}) {
    const std::string want = error_of_last(StageKind::kAutograd, trains);
    EXPECT_NE(want.find(GetParam().text), std::string::npos) << want;
    EXPECT_NE(want.find("of module 'fourth', microbatch 1"), std::string::npos) << want;
    EXPECT_EQ(error_of_last(StageKind::kTape, trains), want);
  }
}

}  // namespace
}  // namespace smp
