// Ranks and groups of a running world under every placement strategy.
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <set>

#include "smp/init.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"

namespace smp {
namespace {

using Groups = std::set<std::vector<int>>;

struct World {
  std::map<int, int> pp_rank, dp_rank;
  Groups pipelines, replicas;
};

// Eight ranks, two stages; what every rank says about itself.
World look_around(const std::string& strategy) {
  std::mutex mutex;
  World world;
  tests::run_smp_ranks(8, {.pipeline_parallel_degree = 2, .placement_strategy = strategy}, [&] {
    EXPECT_EQ(mp_rank(), pp_rank());
    EXPECT_EQ(mp_size(), 2);
    EXPECT_EQ(pp_size(), 2);
    EXPECT_EQ(rdp_rank(), dp_rank());
    EXPECT_EQ(rdp_size(), 4);
    EXPECT_EQ(dp_size(), 4);
    EXPECT_EQ(tp_rank(), 0);
    EXPECT_EQ(tp_size(), 1);
    EXPECT_EQ(get_pp_group().at(static_cast<size_t>(pp_rank())), rank());
    EXPECT_EQ(get_dp_group().at(static_cast<size_t>(dp_rank())), rank());
    EXPECT_EQ(get_mp_group(), get_pp_group());
    EXPECT_EQ(get_rdp_group(), get_dp_group());
    EXPECT_EQ(get_tp_group(), std::vector<int>{rank()});
    EXPECT_EQ(get_world_group().size(), 8u);
    const std::lock_guard<std::mutex> lock(mutex);
    world.pp_rank[rank()] = pp_rank();
    world.dp_rank[rank()] = dp_rank();
    world.pipelines.insert(get_pp_group());
    world.replicas.insert(get_dp_group());
  });
  return world;
}

const Groups kNeighbours{{0, 1}, {2, 3}, {4, 5}, {6, 7}};
const Groups kEverySecond{{0, 2, 4, 6}, {1, 3, 5, 7}};
const Groups kHalves{{0, 1, 2, 3}, {4, 5, 6, 7}};
const Groups kFourApart{{0, 4}, {1, 5}, {2, 6}, {3, 7}};

TEST(PlacementStrategy, ReplicasAboveStagesGiveAPipelineNeighbouringRanks) {
  for (const char* strategy : {"cluster", "DPT", "DTP", "TDP"}) {
    SCOPED_TRACE(strategy);
    const World world = look_around(strategy);
    EXPECT_EQ(world.pipelines, kNeighbours);
    EXPECT_EQ(world.replicas, kEverySecond);
    EXPECT_EQ(world.pp_rank.at(5), 1);
    EXPECT_EQ(world.dp_rank.at(5), 2);
  }
}

TEST(PlacementStrategy, StagesAboveReplicasGiveAStageNeighbouringRanks) {
  for (const char* strategy : {"spread", "PDT", "PTD", "TPD"}) {
    SCOPED_TRACE(strategy);
    const World world = look_around(strategy);
    EXPECT_EQ(world.pipelines, kFourApart);
    EXPECT_EQ(world.replicas, kHalves);
    EXPECT_EQ(world.pp_rank.at(5), 1);
    EXPECT_EQ(world.dp_rank.at(5), 1);
  }
}

TEST(PlacementStrategy, AnUnknownOneIsRefusedByName) {
  const std::string message =
      support::message_of<c10::ValueError>([] { Config::from_json(R"({"placement_strategy": "PPD"})"); });
  EXPECT_TRUE(support::contains(message, "placement_strategy")) << message;
  EXPECT_TRUE(support::contains(message, "TPD")) << message;
}

TEST(PlacementStrategy, TensorParallelismIsRefusedByName) {
  const std::string message =
      support::message_of<c10::ValueError>([] { Config::from_json(R"({"tensor_parallel_degree": 2})"); });
  EXPECT_TRUE(support::contains(message, "tensor_parallel_degree: 2 is not available yet")) << message;
}

}  // namespace
}  // namespace smp
