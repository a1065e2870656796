// Owns the proof of runtime/placement/topology: literal placements, identities for all small worlds, refusals.
#include "runtime/placement/topology.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace smp::runtime {
namespace {

using Kind = GroupKind;
constexpr const char* kStrategies[] = {"DPT", "DTP", "PDT", "PTD", "TDP", "TPD", "cluster", "spread"};

struct Placement {
  const char* strategy;
  std::vector<int> pp, tp, rdp, dp, mp;
};

// The table of SageMaker's documentation for 8 ranks, pp = tp = rdp = 2.
const Placement kTable[] = {
    {"DPT",
     {0, 0, 1, 1, 0, 0, 1, 1},
     {0, 1, 0, 1, 0, 1, 0, 1},
     {0, 0, 0, 0, 1, 1, 1, 1},
     {0, 1, 0, 1, 2, 3, 2, 3},
     {0, 1, 2, 3, 0, 1, 2, 3}},
    {"DTP",
     {0, 1, 0, 1, 0, 1, 0, 1},
     {0, 0, 1, 1, 0, 0, 1, 1},
     {0, 0, 0, 0, 1, 1, 1, 1},
     {0, 0, 1, 1, 2, 2, 3, 3},
     {0, 1, 2, 3, 0, 1, 2, 3}},
    {"PDT",
     {0, 0, 0, 0, 1, 1, 1, 1},
     {0, 1, 0, 1, 0, 1, 0, 1},
     {0, 0, 1, 1, 0, 0, 1, 1},
     {0, 1, 2, 3, 0, 1, 2, 3},
     {0, 1, 0, 1, 2, 3, 2, 3}},
    {"PTD",
     {0, 0, 0, 0, 1, 1, 1, 1},
     {0, 0, 1, 1, 0, 0, 1, 1},
     {0, 1, 0, 1, 0, 1, 0, 1},
     {0, 1, 2, 3, 0, 1, 2, 3},
     {0, 0, 1, 1, 2, 2, 3, 3}},
    {"TDP",
     {0, 1, 0, 1, 0, 1, 0, 1},
     {0, 0, 0, 0, 1, 1, 1, 1},
     {0, 0, 1, 1, 0, 0, 1, 1},
     {0, 0, 1, 1, 2, 2, 3, 3},
     {0, 1, 0, 1, 2, 3, 2, 3}},
    {"TPD",
     {0, 0, 1, 1, 0, 0, 1, 1},
     {0, 0, 0, 0, 1, 1, 1, 1},
     {0, 1, 0, 1, 0, 1, 0, 1},
     {0, 1, 0, 1, 2, 3, 2, 3},
     {0, 0, 1, 1, 2, 2, 3, 3}},
};

TEST(Topology, PlacesEightRanksAsDocumented) {
  for (const Placement& expected : kTable) {
    SCOPED_TRACE(expected.strategy);
    const Topology topology(8, {.pipeline_degree = 2, .tensor_degree = 2}, expected.strategy);
    for (int rank = 0; rank < 8; ++rank) {
      SCOPED_TRACE(rank);
      const size_t i = static_cast<size_t>(rank);
      EXPECT_EQ(topology.group_rank(Kind::kPipeline, rank), expected.pp[i]);
      EXPECT_EQ(topology.group_rank(Kind::kTensor, rank), expected.tp[i]);
      EXPECT_EQ(topology.group_rank(Kind::kReducedData, rank), expected.rdp[i]);
      EXPECT_EQ(topology.group_rank(Kind::kDataParallel, rank), expected.dp[i]);
      EXPECT_EQ(topology.group_rank(Kind::kModelParallel, rank), expected.mp[i]);
    }
  }
}

TEST(Topology, ListsTheGroupsOfClusterAndSpread) {
  const Topology cluster(8, {.pipeline_degree = 2});
  EXPECT_EQ(cluster.group(Kind::kModelParallel, 5), (std::vector<int>{4, 5}));
  EXPECT_EQ(cluster.group(Kind::kDataParallel, 5), (std::vector<int>{1, 3, 5, 7}));
  const Topology spread(8, {.pipeline_degree = 2}, "spread");
  EXPECT_EQ(spread.group(Kind::kModelParallel, 6), (std::vector<int>{2, 6}));
  EXPECT_EQ(spread.group(Kind::kDataParallel, 6), (std::vector<int>{4, 5, 6, 7}));
  const Topology sixteen(16, {.pipeline_degree = 2});
  EXPECT_EQ(sixteen.group(Kind::kModelParallel, 0), (std::vector<int>{0, 1}));
  EXPECT_EQ(sixteen.group(Kind::kDataParallel, 0), (std::vector<int>{0, 2, 4, 6, 8, 10, 12, 14}));
}

TEST(Topology, CountsTensorShardsAsDataParallel) {
  const Topology topology(8, {.tensor_degree = 4});
  EXPECT_EQ(topology.group_rank(Kind::kTensor, 5), 1);
  EXPECT_EQ(topology.group_rank(Kind::kDataParallel, 5), 5);
  EXPECT_EQ(topology.group_rank(Kind::kReducedData, 5), 1);
}

bool contains(const std::vector<int>& group, const std::vector<int>& part) {
  return std::includes(group.begin(), group.end(), part.begin(), part.end());
}

void check_rank(const Topology& topology, int rank) {
  const auto coordinates = topology.coordinates(rank);
  EXPECT_EQ(topology.group_rank(Kind::kPipeline, rank), coordinates.pp_rank);
  EXPECT_EQ(topology.group_rank(Kind::kTensor, rank), coordinates.tp_rank);
  EXPECT_EQ(topology.group_rank(Kind::kReducedData, rank), coordinates.rdp_rank);
  EXPECT_EQ(topology.group_rank(Kind::kWorld, rank), rank);

  const auto tensor = topology.group(Kind::kTensor, rank);
  const auto model = topology.group(Kind::kModelParallel, rank);
  EXPECT_TRUE(contains(topology.group(Kind::kDataParallel, rank), tensor));
  EXPECT_TRUE(contains(model, tensor));
  std::set<int> pipelines;
  for (const int other : tensor)
    for (const int member : topology.group(Kind::kPipeline, other)) pipelines.insert(member);
  EXPECT_EQ(std::vector<int>(pipelines.begin(), pipelines.end()), model);
}

void check_sizes(const Topology& topology, ParallelDegrees degrees) {
  const auto size = [&](Kind kind) { return topology.group_size(kind); };
  const int world = topology.world_size();
  EXPECT_EQ(size(Kind::kPipeline), degrees.pipeline_degree);
  EXPECT_EQ(size(Kind::kTensor), degrees.tensor_degree);
  EXPECT_EQ(size(Kind::kModelParallel) * size(Kind::kReducedData), world);
  EXPECT_EQ(size(Kind::kPipeline) * size(Kind::kDataParallel), world);
  EXPECT_EQ(size(Kind::kPipeline) * size(Kind::kTensor) * size(Kind::kReducedData), world);
  EXPECT_EQ(size(Kind::kModelParallel) * size(Kind::kDataParallel) == world, degrees.tensor_degree == 1);
}

TEST(Topology, KeepsTheIdentitiesForAllStrategiesAndSmallWorlds) {
  for (const char* strategy : kStrategies)
    for (int pp = 1; pp <= 4; ++pp)
      for (int tp = 1; tp <= 4; ++tp)
        for (int rdp = 1; rdp <= 3; ++rdp) {
          SCOPED_TRACE(testing::Message() << strategy << " pp " << pp << " tp " << tp << " rdp " << rdp);
          const Topology topology(pp * tp * rdp, {pp, tp}, strategy);
          check_sizes(topology, {pp, tp});
          for (int rank = 0; rank < topology.world_size(); ++rank) check_rank(topology, rank);
        }
}

TEST(Topology, RefusesAWorldThatTheDegreesDoNotDivide) {
  try {
    Topology(6, {.pipeline_degree = 2, .tensor_degree = 2});
    FAIL() << "expected c10::ValueError";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("2 x 2 = 4, got 6 ranks. Start a multiple of 4 processes"), std::string::npos) << text;
  }
}

TEST(Topology, RefusesUnknownStrategiesAndBadDegrees) {
  for (const char* strategy : {"", "DP", "DPP", "dpt", "DPTX"})
    EXPECT_THROW(Topology(1, {}, strategy), c10::ValueError) << strategy;
  EXPECT_THROW(Topology(0), c10::ValueError);
  EXPECT_THROW(Topology(4, {.pipeline_degree = 0}), c10::ValueError);
  EXPECT_THROW(Topology(4, {.pipeline_degree = 65536, .tensor_degree = 65536}), c10::ValueError);
}

TEST(Topology, RefusesRanksOutsideTheWorld) {
  const Topology topology(4, {.pipeline_degree = 2});
  EXPECT_THROW(topology.coordinates(4), c10::IndexError);
  EXPECT_THROW(topology.coordinates(-1), c10::IndexError);
}

}  // namespace
}  // namespace smp::runtime
