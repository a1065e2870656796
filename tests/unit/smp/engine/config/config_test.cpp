// Configuration: where values come from, what is refused and how, printing, and the page in docs.
#include "smp/config.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "smp/engine/config/config_draft.h"
#include "smp/engine/config/config_table.h"

namespace {

using smp::Config;
using smp::EnvironmentLookup;

EnvironmentLookup environment(std::map<std::string, std::string, std::less<>> variables) {
  return [variables](std::string_view name) -> std::optional<std::string> {
    const auto variable = variables.find(name);
    if (variable == variables.end()) return std::nullopt;
    return variable->second;
  };
}

template <typename Function>
std::string error_of(Function function) {
  try {
    function();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

std::string json_error(std::string_view json) {
  return error_of([&] { Config::from_json(json); });
}

// The complaint about a source that has exactly one problem.
std::string one_error(const std::string& problem) {
  return "configuration: 1 error\n  argument: " + problem +
         "\nCorrect the sources named above; docs/configuration.md lists every key.";
}

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text)
      : path_(std::filesystem::temp_directory_path() / ("smp_config_test_" + std::to_string(::getpid()) + ".json")) {
    std::ofstream(path_) << text;
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

TEST(ConfigSources, EachOverridesTheEarlierKeyByKey) {
  const auto lookup = environment({{"SMP_CONFIG", R"({"microbatches": 3, "seed": 30})"},
                                   {"SM_HP_MP_PARAMETERS", R"({"microbatches": 4, "partitions": 2})"}});
  const Config config =
      Config::resolve({.microbatches = 2, .pipeline = smp::Pipeline::kSimple, .seed = 20, .threads = 5}, lookup);
  EXPECT_EQ(
      config,
      (Config{
          .pipeline_parallel_degree = 2, .microbatches = 4, .pipeline = smp::Pipeline::kSimple, .seed = 30, .threads = 5}));
}

TEST(ConfigSources, EnvironmentCanRestoreADefault) {
  const auto lookup = environment({{"SMP_CONFIG", R"({"microbatches": 1})"}});
  EXPECT_EQ(Config::resolve({.microbatches = 8}, lookup), Config{});
}

TEST(ConfigSources, WithoutAnyIsTheDefault) {
  EXPECT_EQ(Config::resolve({}, environment({})), Config{});
  EXPECT_EQ(Config::from_json("{}"), Config{});
}

TEST(ConfigSources, AnEmptyVariableIsNotSet) {
  const auto lookup = environment({{"SMP_CONFIG", ""}, {"SM_HP_MP_PARAMETERS", ""}});
  EXPECT_EQ(Config::resolve({.seed = 7}, lookup), Config{.seed = 7});
}

TEST(ConfigSources, NullCountsAsNotNamed) {
  const auto lookup = environment({{"SMP_CONFIG", R"({"seed": null, "ddp_port": null})"}});
  EXPECT_EQ(Config::resolve({.seed = 7}, lookup), Config{.seed = 7});
}

TEST(ConfigSources, SmpConfigMayBeAPath) {
  const TemporaryFile file("{\"timeout_s\": 2.5}\n");
  const auto lookup = environment({{"SMP_CONFIG", file.path()}});
  EXPECT_EQ(Config::resolve({}, lookup), Config{.timeout_s = 2.5});
}

TEST(ConfigSources, AFaultInAFileNamesTheFile) {
  const TemporaryFile file(R"({"threads": 0})");
  const auto lookup = environment({{"SMP_CONFIG", file.path()}});
  EXPECT_EQ(error_of([&] { Config::resolve({}, lookup); }),
            "configuration: 1 error\n  SMP_CONFIG (" + file.path() +
                "): threads: expected an integer, 1 or more, got 0\nCorrect the sources named above; docs/configuration.md "
                "lists every key.");
}

TEST(ConfigSources, WhatIsNoRegularFileIsRefused) {
  const TemporaryFile file("");
  std::filesystem::remove(file.path());
  ASSERT_EQ(::mkfifo(file.path().c_str(), 0600), 0);  // nobody will ever write into it
  for (const auto& [path, what] : {std::pair<std::string, std::string>{"/no/such/file.json", "No such file or directory"},
                                   {"/", "it is a folder"},
                                   {file.path(), "it is a FIFO"},
                                   {"/dev/zero", "it is a device"}}) {
    EXPECT_EQ(error_of([&, path = path] { Config::resolve({}, environment({{"SMP_CONFIG", path}})); }),
              "configuration: 1 error\n  SMP_CONFIG: expected a JSON object or the path of a JSON file, got '" + path +
                  "': " + what + ".\nCorrect the sources named above; docs/configuration.md lists every key.");
  }
}

TEST(ConfigSources, TheProcessEnvironmentIsTheDefaultLookup) {
  ::setenv("SMP_CONFIG", R"({"microbatches": 6})", 1);
  const Config config = Config::resolve({});
  ::unsetenv("SMP_CONFIG");
  EXPECT_EQ(config, Config{.microbatches = 6});
}

TEST(ConfigSources, SageMakersOwnExampleIsAccepted) {
  const Config config = Config::from_json(R"({"ddp": true, "microbatches": 4, "partitions": 2,
      "pipeline": "interleaved", "optimize": "speed", "placement_strategy": "spread",
      "memory_weight": 0.8, "tensor_parallel_degree": 1, "prescaled_batch": true, "fp16": false,
      "sharded_data_parallel_degree": 0, "_match_weights": true, "offload_activations": false,
      "sdp_reduce_bucket_size": 5e8, "skip_tracing": true, "static_mode": false, "trace_device": "cpu"})");
  EXPECT_EQ(config, (Config{.pipeline_parallel_degree = 2,
                            .microbatches = 4,
                            .placement_strategy = "spread",
                            .ddp = true,
                            .without_effect = {{"_match_weights", true},
                                               {"memory_weight", 0.8},
                                               {"optimize", "speed"},
                                               {"prescaled_batch", true},
                                               {"skip_tracing", true},
                                               {"trace_device", "cpu"}}}));
  EXPECT_NE(config.to_text().find("\n  optimize: speed\n"), std::string::npos);
}

TEST(ConfigSources, KeysOfFeaturesThatAreOffMayHaveAnyValue) {
  const Config config = Config::from_json(R"({"sharded_data_parallel_degree": 1, "sdp_reduce_bucket_size": 1,
      "sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": -1, "sdp_hierarchical_allgather": false,
      "sdp_gradient_clipping": 3, "tensor_parallel_degree": 1, "tensor_parallel_seed": -7, "fp16_params": true,
      "checkpoint_attentions": true, "offload_activations": true, "activation_loading_horizon": 0, "load_partition": false,
      "partition_file": "a", "ddp": false, "ddp_port": 12345, "ddp_dist_backend": "smddp"})");
  EXPECT_EQ(config.without_effect.size(), 12U);
  EXPECT_EQ(config.ddp_port, 12345);
  EXPECT_EQ(Config::resolve(config, environment({})), config);
  EXPECT_NE(json_error(R"({"sdp_hierarchical_allgather": 3})").find("expected true or false, got 3"), std::string::npos);
}

TEST(ConfigErrors, OfAllSourcesAndKindsComeAtOnce) {
  const auto lookup =
      environment({{"SMP_CONFIG", R"({"microbatchs": 4, "threads": "four", "tensor_parallel_degree": 2})"},
                   {"SM_HP_MP_PARAMETERS", R"({"partitions": 2, "pipeline_parallel_degree": 4, "ddp": 1})"}});
  const Config argument{.default_partition = 2, .timeout_s = 0};
  EXPECT_EQ(error_of([&] { Config::resolve(argument, lookup); }),
            "configuration: 7 errors\n  argument: timeout_s: expected a number, above 0, got 0\n  SMP_CONFIG: unknown key "
            "\"microbatchs\"; did you mean \"microbatches\"?\n  SMP_CONFIG: threads: expected an integer, 1 or more, got "
            "\"four\"\n  SMP_CONFIG: tensor_parallel_degree: 2 is not available yet. Remove the key or set it to 1\n  "
            "SM_HP_MP_PARAMETERS: \"partitions\" and \"pipeline_parallel_degree\" name the same key: expected one value, "
            "got 2 and 4. Remove one\n  SM_HP_MP_PARAMETERS: ddp: expected true or false, got 1\n  argument: "
            "default_partition: expected less than pipeline_parallel_degree=2 (SM_HP_MP_PARAMETERS), got 2\nCorrect the "
            "sources named above; docs/configuration.md lists every key.");
}

TEST(ConfigErrors, OfAJsonArgumentComeWithThoseOfTheEnvironment) {
  const auto lookup = environment({{"SMP_CONFIG", R"({"seed": -1})"}});
  EXPECT_EQ(
      error_of([&] { Config::resolve_json(R"({"threads": 0})", lookup); }),
      "configuration: 2 errors\n  argument: threads: expected an integer, 1 or more, got 0\n  SMP_CONFIG: seed: expected an "
      "integer, 0 or more, got -1\nCorrect the sources named above; docs/configuration.md lists every key.");
}

TEST(ConfigErrors, EveryTypeSaysWhatItExpects) {
  const std::map<std::string, std::string> problem_of = {
      {R"({"auto_partition": "True"})", "auto_partition: expected true or false, got \"True\""},
      {R"({"microbatches": 2.5})", "microbatches: expected an integer, 1 or more, or \"auto\", got 2.5"},
      {R"({"microbatches": true})", "microbatches: expected an integer, 1 or more, or \"auto\", got true"},
      {R"({"microbatches": "many"})", "microbatches: expected an integer, 1 or more, or \"auto\", got \"many\""},
      {R"({"microbatches": [2]})", "microbatches: expected an integer, 1 or more, or \"auto\", got [2]"},
      {R"({"microbatches": 3000000000})", "microbatches: expected at most 2147483647, got 3000000000"},
      {R"({"seed": 18446744073709551615})", "seed: expected an integer, 0 or more, got 18446744073709551615"},
      {R"({"memory_weight": 1.5})", "memory_weight: expected a number, 0 to 1, got 1.5"},
      {R"({"timeout_s": "1"})", "timeout_s: expected a number, above 0, got \"1\""},
      {R"({"pipeline": "gpipe"})", "pipeline: expected one of \"interleaved\", \"simple\", got \"gpipe\""},
      {R"({"pipeline": 1})", "pipeline: expected one of \"interleaved\", \"simple\", got 1"},
      {R"({"placement_strategy": "DP"})",
       "placement_strategy: expected one of \"cluster\", \"spread\", \"DPT\", \"DTP\", \"PDT\", \"PTD\", \"TDP\", \"TPD\", "
       "got \"DP\""},
      {R"({"ddp_port": 65536})", "ddp_port: expected an integer, 0 to 65535, got 65536"},
      {R"({"load_partition": true})", "load_partition: true is not available yet. Remove the key or set it to false"},
      {R"({"sharded_data_parallel_degree": 2})",
       "sharded_data_parallel_degree: 2 is not available yet. Remove the key or set it to 1"},
      {R"({"partitions": 0.5})", "partitions: expected an integer, 0 or more, got 0.5"},
  };
  for (const auto& [json, problem] : problem_of) EXPECT_EQ(json_error(json), one_error(problem));
}

TEST(ConfigErrors, AFieldOutsideItsConstraintIsRefusedWithoutJson) {
  const auto error = [](const Config& config) { return error_of([&] { Config::resolve(config, environment({})); }); };
  EXPECT_EQ(error({.microbatches = 0}), one_error("microbatches: expected an integer, 1 or more, or \"auto\", got 0"));
  EXPECT_EQ(error({.timeout_s = std::nan("")}), one_error("timeout_s: expected a number, above 0, got nan"));
  EXPECT_EQ(error({.pipeline = static_cast<smp::Pipeline>(7)}),
            one_error("pipeline: expected one of \"interleaved\", \"simple\", got \"\""));
  EXPECT_EQ(error({.without_effect = {{"memory_weight", 1.5}}}),
            one_error("memory_weight: expected a number, 0 to 1, got 1.5"));
  EXPECT_EQ(error({.without_effect = {{"microbatches", int64_t{2}}}}),
            one_error("without_effect: expected keys of docs/configuration.md without effect, got \"microbatches\""));
}

TEST(ConfigErrors, AKeyGivenTwiceIsRefused) {
  EXPECT_EQ(json_error(R"({"seed": 1, "threads": 2, "seed": 3, "se\u0065d": 4})"),
            one_error("\"seed\": expected once, got several times. Keep one"));
  EXPECT_NE(json_error(R"({"seed": {"a": 1, "a": 2}})").find("\"a\": expected once, got several times. Keep one"),
            std::string::npos);
}

TEST(ConfigErrors, AliasesThatAgreeAreAccepted) {
  EXPECT_EQ(Config::from_json(R"({"partitions": 2, "pipeline_parallel_degree": 2})"), Config{.pipeline_parallel_degree = 2});
}

TEST(ConfigErrors, TextThatIsNoJsonObjectIsRefusedWithItsPlace) {
  EXPECT_EQ(json_error("{'microbatches': 4}")
                .find("configuration: 1 error\n  argument: expected a JSON object, got a fault at byte 1, near "
                      "'{'microbatches': 4}'"),
            0U);
  for (const std::string text :
       {"", "{", R"({"seed": 1} x)", R"({"seed": True})", "\xff\xfe", R"({"seed":1,})", R"({"a":[[[[[[1]]]]]]})"}) {
    EXPECT_NE(json_error(text).find("got a fault at byte"), std::string::npos) << text;
  }
  for (const std::string text : {"[1]", "4", "\"seed\"", "null"}) {
    EXPECT_NE(json_error(text).find("got another JSON value"), std::string::npos) << text;
  }
}

TEST(ConfigErrors, ALongValueIsCut) {
  const std::string error = json_error("{\"seed\": \"" + std::string(5000, 'x') + "\"}");
  EXPECT_LT(error.size(), 300U);
  EXPECT_NE(error.find("xxx..."), std::string::npos);
}

TEST(ConfigSuggestions, NameTheNearestKeyOrNone) {
  const std::map<std::string, std::string> suggestion_of = {
      {"microbatch", "microbatches"},
      {"micro_batches", "microbatches"},
      {"mircobatches", "microbatches"},
      {"partition", "partitions"},
      {"pipeline_paralel_degree", "pipeline_parallel_degree"},
      {"tensor_parallel_degre", "tensor_parallel_degree"},
      {"sede", "seed"},
      {"timeout", "timeout_s"},
      {"placement_stratgey", "placement_strategy"},
  };
  for (const auto& [word, suggestion] : suggestion_of) {
    EXPECT_EQ(json_error("{\"" + word + "\": 1}"),
              one_error("unknown key \"" + word + "\"; did you mean \"" + suggestion + "\"?"));
  }
  EXPECT_EQ(json_error(R"({"colour": 1})"), one_error("unknown key \"colour\""));
  EXPECT_EQ(json_error(R"({"": 1})"), one_error("unknown key \"\""));
}

TEST(ConfigSuggestions, CountASwapOfNeighboursAsOneEdit) {
  EXPECT_EQ(smp::engine::nearest("abdc", {"abcd"}), "abcd");
  EXPECT_EQ(smp::engine::nearest("badc", {"abcd"}), "");
  EXPECT_EQ(smp::engine::nearest("abcx", {"abyz", "abcd"}), "abcd");
}

TEST(ConfigErrors, APlannedDeviceIsOneOfTheTable) {
  EXPECT_EQ(Config::from_json(R"({"planned_device": "NVIDIA H100 80GB HBM3"})").planned_device, "NVIDIA H100 80GB HBM3");
  const std::string unknown = json_error(R"({"planned_device": "abacus"})");
  EXPECT_NE(unknown.find("planned_device: expected one of B200, H200, H100, "), std::string::npos) << unknown;
  EXPECT_NE(unknown.find(", got \"abacus\""), std::string::npos) << unknown;
  const std::string measured = json_error(R"({"planned_device": "H100", "cost": "measured"})");
  EXPECT_NE(measured.find("planned_device: expected none with cost=\"measured\" (argument)"), std::string::npos) << measured;
}

TEST(ConfigErrors, WhatSaysWhereThingsGoExcludesAutoParallelism) {
  const std::string with = " with parallelism=\"auto\" (argument), got ";
  EXPECT_EQ(json_error(R"({"parallelism": "auto", "partitions": 2})"),
            one_error("pipeline_parallel_degree: expected none" + with + "2"));
  EXPECT_EQ(json_error(R"({"parallelism": "auto", "auto_partition": false})"),
            one_error("auto_partition: expected true" + with + "false"));
  EXPECT_EQ(json_error(R"({"parallelism": "auto", "rank_speed": [1, 0.5]})"),
            one_error("rank_speed: expected equal ranks" + with + "[1,0.5]"));
}

}  // namespace
