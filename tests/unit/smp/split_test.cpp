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

// What the ranks of one pipeline hold, put together; losses and outputs must agree between ranks.
OracleResult split(const ZooModel& model, int stages, int microbatches, Pipeline schedule) {
  std::mutex mutex;
  OracleResult all;
  Config config;
  config.microbatches = microbatches;
  config.pipeline = schedule;
  config.seed = support::kSplitBaseSeed;
  tests::run_smp_ranks(stages, config, [&] {
    const OracleResult mine = support::run_split(model);
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
    const OracleResult want = support::run_unsplit(model, microbatches);
    for (const Pipeline schedule : {Pipeline::kInterleaved, Pipeline::kSimple}) {
      const OracleResult got = split(model, stages, microbatches, schedule);
      support::expect_same_step(got, want, "microbatches " + std::to_string(microbatches),
                                support::gradient_tolerance(model, stages));
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
