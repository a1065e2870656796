// The shared command line: defaults, every flag, mistakes, help.
#include "examples/common/flags.h"

#include <gtest/gtest.h>

#include <vector>

namespace {

using examples::FlagParser;
using examples::Flags;

std::optional<int> parse(FlagParser& parser, std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "program");
  return parser.parse(static_cast<int>(arguments.size()), arguments.data());
}

TEST(Flags, WithoutArgumentsKeepTheDefaultsOfTheExample) {
  Flags flags{.epochs = 3, .optimizer = examples::Optimizer::kAdamW, .lr = 5.0};
  FlagParser parser("Trains.", flags);
  EXPECT_EQ(parse(parser, {}), std::nullopt);
  EXPECT_EQ(flags.epochs, 3);
  EXPECT_EQ(flags.optimizer, examples::Optimizer::kAdamW);
  EXPECT_EQ(flags.lr, 5.0);
}

TEST(Flags, AllAreRead) {
  Flags flags;
  FlagParser parser("Trains.", flags);
  EXPECT_EQ(
      parse(parser,
            {"--steps", "50",         "--epochs=2", "--batch-size", "32",     "--microbatches", "8",    "--pipeline-degree",
             "2",       "--schedule", "simple",     "--partition",  "manual", "--optimizer",    "adam", "--lr",
             "1e-3",    "--seed",     "7",          "--threads",    "3",      "--data",         "/a b", "--log",
             "x.jsonl", "--device",   "cuda"}),
      std::nullopt);
  EXPECT_EQ(flags.steps, 50);
  EXPECT_EQ(flags.epochs, 2);
  EXPECT_EQ(flags.batch_size, 32);
  EXPECT_EQ(flags.microbatches, 8);
  EXPECT_EQ(flags.pipeline_degree, 2);
  EXPECT_EQ(flags.schedule, smp::Pipeline::kSimple);
  EXPECT_EQ(flags.partition, examples::Partition::kManual);
  EXPECT_EQ(flags.optimizer, examples::Optimizer::kAdam);
  EXPECT_EQ(flags.lr, 1e-3);
  EXPECT_EQ(flags.seed, 7);
  EXPECT_EQ(flags.threads, 3);
  EXPECT_EQ(flags.device, smp::DeviceKind::kCuda);
  EXPECT_EQ(flags.data, "/a b");
  EXPECT_EQ(flags.log, "x.jsonl");
  EXPECT_EQ(flags.config(), (smp::Config{.pipeline_parallel_degree = 2,
                                         .microbatches = 8,
                                         .pipeline = smp::Pipeline::kSimple,
                                         .device = smp::DeviceKind::kCuda,
                                         .auto_partition = false,
                                         .seed = 7,
                                         .threads = 3}));
}

TEST(Flags, ThatAnExampleAddsAreReadToo) {
  Flags flags;
  FlagParser parser("Trains.", flags);
  int64_t bptt = 35;
  double dropout = 0.2;
  bool is_tied = false;
  std::string name = "a";
  parser.add("--bptt", bptt, "Tokens");
  parser.add("--dropout", dropout, "Probability");
  parser.add("--tied", is_tied, "Ties weights");
  parser.add("--name", name, "Name");
  EXPECT_EQ(parse(parser, {"--bptt", "16", "--dropout", "0.5", "--tied", "--name", "b"}), std::nullopt);
  EXPECT_EQ(bptt, 16);
  EXPECT_EQ(dropout, 0.5);
  EXPECT_TRUE(is_tied);
  EXPECT_EQ(name, "b");
}

TEST(Flags, MistakesEndWithTwoAndNameTheFlag) {
  const std::vector<std::vector<const char*>> mistakes = {{"--microbatches", "0"},
                                                          {"--steps", "-1"},
                                                          {"--lr", "0"},
                                                          {"--lr", "fast"},
                                                          {"--epochs", "1.5"},
                                                          {"--schedule", "gpipe"},
                                                          {"--partition", "automatic"},
                                                          {"--optimizer", "lbfgs"},
                                                          {"--threads"},
                                                          {"--batch-sise", "4"}};
  for (const auto& mistake : mistakes) {
    Flags flags;
    FlagParser parser("Trains.", flags);
    testing::internal::CaptureStderr();
    EXPECT_EQ(parse(parser, mistake), 2) << mistake[0];
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find(mistake[0]), std::string::npos) << text;
  }
}

std::string answer_to(const std::vector<const char*>& arguments) {
  Flags flags;
  FlagParser parser("Trains.", flags);
  int64_t heads = 4, print_every = 20;
  parser.add("--heads", heads, "Heads");
  parser.add("--print-every", print_every, "Steps", 0);
  testing::internal::CaptureStderr();
  const auto code = parse(parser, arguments);
  const std::string text = testing::internal::GetCapturedStderr();
  return code ? text : "accepted";
}

TEST(Flags, ACountBelowItsMinimumIsAnsweredWithExpectedAndGot) {
  for (const char* flag : {"--epochs", "--batch-size", "--microbatches", "--threads", "--heads"}) {
    for (const char* value : {"0", "-1", "1.5", "many", "99999999999999999999"}) {
      const std::string expected = std::string(flag) + ": expected an integer, 1 or more, got " + value;
      const std::string argument = std::string(flag) + "=" + value;
      EXPECT_NE(answer_to({argument.c_str()}).find(expected), std::string::npos) << expected;
    }
  }
  for (const char* flag : {"--steps", "--pipeline-degree", "--seed", "--print-every"}) {
    EXPECT_EQ(answer_to({flag, "0"}), "accepted") << flag;
    const std::string text = answer_to({(std::string(flag) + "=-1").c_str()});
    EXPECT_NE(text.find(std::string(flag) + ": expected an integer, 0 or more, got -1"), std::string::npos) << text;
  }
  EXPECT_NE(answer_to({"--lr=nan"}).find("--lr: expected a number above 0, got nan"), std::string::npos);
}

TEST(Flags, AWrongWordIsAnsweredWithTheRightOnes) {
  Flags flags;
  FlagParser parser("Trains.", flags);
  testing::internal::CaptureStderr();
  parse(parser, {"--optimizer", "lbfgs"});
  EXPECT_NE(testing::internal::GetCapturedStderr().find("--optimizer: expected adam|adamw|sgd, got lbfgs"),
            std::string::npos);
}

TEST(Flags, AnExampleThatDrawsItsDataHasNoFlagsOfFiles) {
  Flags flags{.steps = 5};
  FlagParser parser("Trains.", flags, examples::DataSource::kDrawn);
  testing::internal::CaptureStderr();
  EXPECT_EQ(parse(parser, {"--data=file"}), 2);
  EXPECT_EQ(parse(parser, {"--epochs=2"}), 2);
  EXPECT_EQ(parse(parser, {"--steps=0"}), 2);
  EXPECT_NE(testing::internal::GetCapturedStderr().find("--steps: expected an integer, 1 or more, got 0"),
            std::string::npos);
  EXPECT_FALSE(parse(parser, {"--steps=7"}));
  EXPECT_EQ(flags.steps, 7);
}

TEST(Flags, HelpGoesToStdoutWithDefaultsAndEndsWithZero) {
  Flags flags{.batch_size = 20, .schedule = smp::Pipeline::kSimple};
  FlagParser parser("Trains a model.", flags);
  testing::internal::CaptureStdout();
  EXPECT_EQ(parse(parser, {"--help"}), 0);
  const std::string text = testing::internal::GetCapturedStdout();
  for (const char* flag : {"Trains a model.", "--steps", "--epochs", "--batch-size", "--microbatches", "--pipeline-degree",
                           "--schedule", "--partition", "--optimizer", "--lr", "--seed", "--threads", "--device", "--data",
                           "--log", "=20", "=simple", "=auto", "interleaved|simple"}) {
    EXPECT_NE(text.find(flag), std::string::npos) << flag << " in\n" << text;
  }
}

}  // namespace
