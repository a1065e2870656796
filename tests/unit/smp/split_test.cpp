// Every model of the zoo, split: bit-equal to the unsplit model.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <mutex>

#include "smp/smp.h"
#include "tests/support/bits.h"
#include "tests/support/model_zoo.h"
#include "tests/support/oracle.h"
#include "tests/support/smp_ranks.h"
#include "tests/support/split_run.h"

namespace smp {
namespace {

using support::OracleResult;
using support::ZooModel;

constexpr int64_t kBatch = 40;
constexpr uint64_t kModelSeed = 7, kDataSeed = 11, kBaseSeed = 5;

OracleResult unsplit(const ZooModel& model, int microbatches) {
  const auto module = model.make(kModelSeed);
  return support::run_oracle(model, *module, model.make_inputs(kBatch, kDataSeed), microbatches,
                             {.base_seed = kBaseSeed}, /*training=*/true);
}

// What the ranks of one pipeline hold, put together; losses and outputs must agree between ranks.
OracleResult split(const ZooModel& model, int stages, int microbatches, Pipeline schedule) {
  std::mutex mutex;
  OracleResult all;
  Config config;
  config.microbatches = microbatches;
  config.pipeline = schedule;
  config.seed = kBaseSeed;
  tests::run_smp_ranks(stages, config, [&] {
    const auto module = model.make(kModelSeed);
    const OracleResult mine = support::run_split(model, module, model.make_inputs(kBatch, kDataSeed));
    const std::lock_guard<std::mutex> lock(mutex);
    if (!all.losses.empty()) support::expect_bit_equal(mine.losses, all.losses, "losses on two ranks");
    all.losses = mine.losses;
    all.outputs = mine.outputs;
    all.buffers = mine.buffers;
    for (const auto& [name, gradient] : mine.gradients) all.gradients[name] = gradient;
  });
  return all;
}

class Split : public testing::TestWithParam<std::tuple<ZooModel, int>> {};

TEST_P(Split, EqualsTheUnsplitModelBitForBit) {
  const auto& [model, stages] = GetParam();
  at::set_num_threads(1);
  for (const int microbatches : {1, 2, 5, 8}) {
    const OracleResult want = unsplit(model, microbatches);
    for (const Pipeline schedule : {Pipeline::kInterleaved, Pipeline::kSimple}) {
      const OracleResult got = split(model, stages, microbatches, schedule);
      support::expect_same_step(got, want, "microbatches " + std::to_string(microbatches),
                                model.has_tied_weights && stages > 1 ? 1e-6 : 0.0);
    }
  }
}

std::string name_of(const testing::TestParamInfo<Split::ParamType>& test) {
  return std::get<0>(test.param).name + "_on_" + std::to_string(std::get<1>(test.param));
}

INSTANTIATE_TEST_SUITE_P(Zoo, Split,
                         testing::Combine(testing::ValuesIn(support::model_zoo()), testing::Values(1, 2, 3, 4)),
                         name_of);

}  // namespace
}  // namespace smp
