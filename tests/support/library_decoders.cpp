// What encoders of the library write, and how it is read.
#include "tests/support/library_decoders.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>

#include <memory>

#include "partitioner/graph/graph.h"
#include "runtime/exchange/wire.h"
#include "smp/comm.h"
#include "smp/config.h"
#include "smp/engine/checkpoint/spread_save.h"
#include "smp/engine/files/save_files.h"
#include "smp/engine/models/models.h"
#include "smp/engine/optimizers/optimizer_state.h"
#include "smp/engine/planning/measure_costs.h"
#include "smp/engine/replicas/replica_step.h"
#include "smp/engine/timeline/step_timeline.h"
#include "smp/engine/timeline/stragglers.h"
#include "smp/safetensors.h"
#include "tests/support/plan_cases.h"
#include "tests/unit/examples/temporary_folder.h"

namespace smp {
namespace {

using support::Decoder;

enum class Colour : uint8_t { kRed, kBlue };

struct Everything {
  at::Tensor tensor;
  std::map<std::string, std::vector<std::optional<at::Tensor>>> by_name;
  std::tuple<bool, Colour, double> facts;
  std::pair<std::array<int16_t, 3>, std::string> pair;
  std::vector<bool> flags;
  support::Tree tree;
};

}  // namespace

template <>
struct Fields<Everything> {
  static auto of(auto& all) { return std::tie(all.tensor, all.by_name, all.facts, all.pair, all.flags, all.tree); }
};

namespace {

using comm_internal::bytes_of;
using comm_internal::object_of;

template <class T>
Decoder structs(const char* name, const std::vector<T>& all) {
  Decoder decoder{name, {}, [](std::string_view bytes) { runtime::decode<T>(bytes, "struct"); }};
  for (const T& each : all) decoder.corpus.push_back(runtime::encode(each));
  return decoder;
}

Decoder objects() {
  const at::Tensor numbers = at::arange(6, at::kFloat).reshape({2, 3});
  const Everything all{numbers.t(),
                       {{"a", {numbers, std::nullopt, at::Tensor()}}, {"b", {}}},
                       {true, Colour::kBlue, 0.5},
                       {{1, 2, 3}, "text"},
                       {true, false},
                       {1, {{2, {{3, {}}, {4, {}}}}, {5, {}}}}};
  return {"object", {bytes_of(all), bytes_of(Everything{})}, [](std::string_view bytes) {
            object_of<Everything>(std::string(bytes));
          }};
}

Decoder files() {
  const auto folder = std::make_shared<TemporaryFolder>();
  const at::Tensor numbers = at::arange(6, at::kFloat);
  write_safetensors(folder->path("a"),
                    {.tensors = {{"ab", numbers.reshape({2, 3})}, {"c", at::ones({}, at::kLong)}, {"d", at::ones({0, 4})}},
                     .metadata = {{"key", "value"}}});
  write_safetensors(folder->path("b"), {});
  return {"safetensors", {folder->read("a"), folder->read("b")}, [folder](std::string_view bytes) {
            folder->write("c", std::string(bytes));
            read_safetensors(folder->path("c"));
          }};
}

Decoder configurations() {
  return {"configuration",
          {Config{}.to_json(), R"({"microbatches": 4, "pipeline": "simple", "rank_speed": [1, 0.5]})"},
          [](std::string_view text) { Config::from_json(text); }};
}

Decoder groups() {
  OptimizerState state{
      .kind = "Adam", .groups = {{{{"lr", 0.1}, {"eps", 1e-8}}, {"fc.weight", "fc.bias"}}, {}}, .entries = {}};
  return {"groups", {engine::groups_to_json(state)}, [](std::string_view text) {
            OptimizerState read;
            engine::groups_from_json(std::string(text), read);
          }};
}

Decoder timelines() {
  using partitioner::Activity;
  const partitioner::RankTimeline rank{
      1,
      2,
      {{7,
        true,
        10,
        90,
        {{Activity::kAction, {partitioner::ActionKind::kForward, 1, 2, -1}, 10, 20}, {Activity::kResults, {}, 20, 90}}},
       {}}};
  return structs<partitioner::RankTimeline>("timeline", {rank, {}});
}

Decoder replica_steps() {
  engine::ReplicaStep step{.step_function = 2, .training_steps = 5, .trains = true, .error = "no", .homes = "fc 0\n"};
  step.reduced = {runtime::Averaging::kKeeps, runtime::Averaging::kMakesNone};
  step.asked = {runtime::Averaging::kKeeps, runtime::Averaging::kAverages};
  step.settings = {{.prefix = "a.", .num_trainable = 1, .num_parameters = 2, .pattern = 3, .has_hook = true, .num_hooks = 1},
                   {.prefix = "b."}};
  return structs<engine::ReplicaStep>("replica step", {step, {}});
}

Decoder nonfinite_numbers() {
  const engine::NonfiniteNumber number{
      .place = engine::NonfinitePlace::kMeanGradient, .is_nan = true, .rank = 3, .parameter = "fc.weight"};
  return structs<engine::NonfiniteNumber>("nonfinite number", {number, {}});
}

Decoder measurements() {
  const std::vector<engine::GraphToPlan> graphs{{testing::mlp(1), {}}, {partitioner::Graph{}, {}}};
  return {"measurement",
          {engine::encode_wanted(graphs, {100, 200}), engine::encode_wanted({}, {})},
          [](std::string_view bytes) { engine::decode_wanted(bytes); }};
}

Decoder folder_views() {
  const engine::SeenSave whole{
      .id = "0123456789abcdef", .num_ranks = 3, .ranks = {0, 1, 2}, .written = 7, .is_indexed = true};
  runtime::WireWriter out, empty;
  engine::put_view({.has_save = true, .is_damaged = false, .saves = {whole, {.id = "fedcba9876543210"}}}, out);
  engine::put_view({}, empty);
  return {"view of a save's folder", {out.take(), empty.take()}, [](std::string_view bytes) {
            runtime::read_all(bytes, "view", engine::get_view);
          }};
}

Decoder paces() {
  const engine::Pace pace{.period_ns = 2, .has_run = true, .process = "pid 7 on host a"};
  return structs<engine::Pace>("pace", {pace, {}});
}

Decoder indices() {
  const auto folder = std::make_shared<TemporaryFolder>();
  const engine::SaveFiles files{.folder = folder->path(""), .id = "0123456789abcdef", .num_ranks = 2};
  return {"index", {files.index_text()}, [folder](std::string_view text) {
            folder->write("state.json", std::string(text));
            engine::find_save(folder->path(""));
          }};
}

}  // namespace

namespace support {

std::vector<Decoder> library_decoders() {
  return {objects(),           files(),        configurations(), groups(), timelines(), replica_steps(),
          nonfinite_numbers(), measurements(), folder_views(),   paces(),  indices()};
}

}  // namespace support
}  // namespace smp
