// How a configuration prints, and the page in docs.
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "smp/config.h"
#include "smp/engine/config/config_table.h"

namespace {

using smp::Config;

// A Config in which every field differs from its default.
Config every_field_changed() {
  Config config;
  for (const auto& key : smp::engine::config_keys()) {
    auto value = default_value(key);
    if (auto* flag = std::get_if<bool>(&value)) *flag = !*flag;
    if (auto* integer = std::get_if<int64_t>(&value)) *integer += 2;
    if (auto* number = std::get_if<double>(&value)) *number = 0.1;
    if (auto* list = std::get_if<std::vector<double>>(&value)) *list = {1, 0.5};
    if (auto* word = std::get_if<std::string>(&value)) {
      const bool is_last = !key.choices.empty() && *word == key.choices.back();
      *word = key.choices.empty() ? "a.json" : is_last ? key.choices.front() : key.choices.back();
    }
    set(key, value, config);
  }
  config.pipeline_parallel_degree = 3;  // default_partition is 2 now
  config.planned_device = "H100";
  return config;
}

TEST(ConfigText, RoundTripsThroughJson) {
  Config changed = every_field_changed();
  changed.parallelism = smp::Parallelism::kManual;                       // kAuto excludes others
  changed.memory_limit = "";                                             // excludes other memory_limit_mb
  const std::string device = std::exchange(changed.planned_device, "");  // excludes measured costs
  EXPECT_EQ(Config::from_json(changed.to_json()), changed);
  const Config planned{.planned_device = device};
  EXPECT_EQ(Config::from_json(planned.to_json()), planned);
  const Config automatic{.parallelism = smp::Parallelism::kAuto, .microbatches = smp::kAutoMicrobatches};
  EXPECT_EQ(Config::from_json(automatic.to_json()), automatic);
  EXPECT_EQ(Config::from_json(R"({"parallelism": "auto", "microbatches": "auto"})"), automatic);
  EXPECT_EQ(Config::from_json(Config{}.to_json()), Config{});
}

TEST(ConfigText, DifferencesNameEveryFieldThatDiffers) {
  EXPECT_EQ(Config::differences({}, {}), std::vector<std::string>{});
  EXPECT_EQ(Config::differences({}, Config::from_json(R"({"prescaled_batch": true, "_match_weights": true})")),
            std::vector<std::string>{});
  EXPECT_EQ(
      Config::differences({.microbatches = 4, .pipeline = smp::Pipeline::kSimple}, {.microbatches = 2, .timeout_s = 0.5}),
      (std::vector<std::string>{"microbatches: 4 against 2", "pipeline: simple against interleaved",
                                "timeout_s: 120 against 0.5"}));
  size_t fields = 0;
  for (const auto& key : smp::engine::config_keys()) fields += std::holds_alternative<std::monostate>(key.field) ? 0 : 1;
  EXPECT_EQ(Config::differences({}, every_field_changed()).size(), fields);
}

TEST(ConfigText, PrintsSageMakersListThenOurs) {
  EXPECT_EQ(Config{.pipeline_parallel_degree = 1}.to_text(), R"(Configuration parameters:
  pipeline_parallel_degree: 1
  microbatches: 1
  pipeline: interleaved
  horovod: false
  ddp: false
  tensor_parallel_degree: 1
  ddp_port: 0
  ddp_dist_backend: auto
  contiguous: true
  placement_strategy: cluster
  optimize: memory
  default_partition: 0
  auto_partition: true
  prescaled_batch: false
  memory_weight: 0
  active_microbatches: 0
  fp16_params: false
  tensor_parallel_seed: 0
  offload_activations: false
  shard_optimizer_state: false
  skip_tracing: false
  activation_loading_horizon: 4
  broadcast_buffers: true
  bucket_cap_mb: 25
  max_cached_graphs: 64
  memory_limit_mb: 0
  rank_memory_limit_mb: []
  rank_speed: []
  virtual_stages: 1
  seed: 0
  threads: 1
  timeout_s: 120
  log_level: info)");
}

TEST(Config, ListsOfNumbersAreReadCheckedAndPrinted) {
  const Config config = Config::from_json(R"({"rank_speed": [1, 0.5], "rank_memory_limit_mb": [0, 2000]})");
  EXPECT_EQ(config.rank_speed, (std::vector<double>{1, 0.5}));
  EXPECT_EQ(Config::from_json(config.to_json()), config);
  EXPECT_NE(config.to_text().find("rank_speed: [1,0.5]"), std::string::npos);
  const auto refusal = [](const char* text) -> std::string {
    try {
      Config::from_json(text);
    } catch (const c10::ValueError& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  EXPECT_NE(refusal(R"({"rank_speed": [1, 0]})").find("rank_speed: expected a list of numbers, above 0, got [1,0]"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"rank_speed": 2})").find("expected a list of numbers, above 0, got 2"), std::string::npos);
  EXPECT_NE(refusal(R"({"rank_speed": [1, "a"]})").find("expected a list of numbers"), std::string::npos);
  EXPECT_NE(refusal(R"({"rank_memory_limit_mb": [-1]})").find("expected a list of numbers, 0 or more"), std::string::npos);
}

TEST(Config, TakesAMemoryLimitAsText) {
  EXPECT_EQ(Config::from_json(R"({"memory_limit": "40GiB"})").memory_limit_mb, 40 << 10);
  EXPECT_EQ(Config::from_json(R"({"memory_limit": "1500MiB", "memory_limit_mb": 1500})").memory_limit_mb, 1500);
  EXPECT_EQ(Config::from_json(R"({"memory_limit": "2TiB"})").memory_limit_mb, 2 << 20);
  for (const char* text : {"40", "40 GiB", "40GB", "0GiB", "-1GiB", "1.5GiB", "GiB", "99999999999999GiB"}) {
    EXPECT_THROW(Config::from_json(R"({"memory_limit": ")" + std::string(text) + "\"}"), c10::ValueError) << text;
  }
  EXPECT_THROW(Config::from_json(R"({"memory_limit": "1GiB", "memory_limit_mb": 1000})"), c10::ValueError);
}

TEST(ConfigTable, EveryRowAcceptsItsDefaultAndHasAMeaning) {
  for (const auto& key : smp::engine::config_keys()) {
    EXPECT_EQ(check(key, default_value(key)), std::nullopt) << key.name;
    EXPECT_FALSE(key.meaning.empty()) << key.name;
    EXPECT_FALSE(key.support == smp::engine::Support::kNotYet && key.field.index() != 0)
        << key.name << " has a field, so users can set it in C++";
  }
}

TEST(ConfigTable, PageInDocsIsInStep) {
  std::ifstream file(SMP_SOURCE_DIR "/docs/configuration.md");
  std::ostringstream page;
  page << file.rdbuf();
  EXPECT_NE(page.str().find(Config::reference_table()), std::string::npos)
      << "expected docs/configuration.md to contain this text; paste it there:\n"
      << Config::reference_table();
}

}  // namespace
