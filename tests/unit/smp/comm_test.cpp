// Objects and groups between ranks, and every misuse of them.
#include "smp/comm.h"

#include <gtest/gtest.h>

#include <limits>

#include "smp/engine/context/context.h"
#include "smp/engine/groups/made_group.h"
#include "tests/support/messages.h"
#include "tests/support/smp_ranks.h"
#include "tests/unit/smp/small_net.h"

namespace smp {
namespace {

using support::contains;
using support::expect_bit_equal;
using support::message_of;
using tests::run_smp_ranks;

enum class Colour : uint8_t { kRed, kBlue };

struct Sample {
  at::Tensor ids;
  std::string name;
  std::optional<double> weight;
  bool operator==(const Sample& other) const { return ids.equal(other.ids) && name == other.name && weight == other.weight; }
};

// Readable only in the order of writing.
class Words {
 public:
  Words() = default;
  explicit Words(std::vector<std::string> list) : list_(std::move(list)) {}
  const std::vector<std::string>& list() const { return list_; }

 private:
  std::vector<std::string> list_;
};

struct ReadsTooLittle {};

}  // namespace

template <>
struct Fields<Sample> {
  static auto of(auto& sample) { return std::tie(sample.ids, sample.name, sample.weight); }
};
template <>
struct Serialiser<Words> {
  static void write(Writer& out, const Words& words) { out.put(words.list()); }
  static Words read(Reader& in) { return Words(in.get<std::vector<std::string>>()); }
};
template <>
struct Serialiser<ReadsTooLittle> {
  static void write(Writer& out, const ReadsTooLittle&) { out.put(1.5); }
  static ReadsTooLittle read(Reader&) { return {}; }
};

namespace {

static_assert(Serialisable<std::map<std::string, std::vector<std::optional<at::Tensor>>>>);
static_assert(!Serialisable<std::unique_ptr<int>>);
static_assert(!Serialisable<std::vector<std::unique_ptr<int>>>);

// What rank 1 receives when rank 0 sends `object`.
template <class T>
T through(const T& object) {
  T received{};
  run_smp_ranks(2, {}, [&] {
    if (rank() == 0) send(object, 1, WORLD_RANK);
    if (rank() == 1) received = recv_from<T>(0, WORLD_RANK);
  });
  return received;
}

TEST(Comm, ValuesArriveAsTheyWere) {
  EXPECT_EQ(through<int64_t>(-3), -3);
  EXPECT_EQ(through(true), true);
  EXPECT_EQ(through(Colour::kBlue), Colour::kBlue);
  EXPECT_EQ(through(std::numeric_limits<double>::denorm_min()), std::numeric_limits<double>::denorm_min());
  EXPECT_EQ(through(std::string("a\0b", 3)), std::string("a\0b", 3));
  EXPECT_EQ(through(std::string()), "");
  const std::vector<bool> flags{true, false, true};
  EXPECT_EQ(through(flags), flags);
  const std::map<std::string, std::vector<std::pair<int, double>>> nested{{"a", {{1, 0.5}}}, {"b", {}}};
  EXPECT_EQ(through(nested), nested);
  const std::tuple<int, std::optional<std::string>, std::optional<int>> tuple{4, "x", std::nullopt};
  EXPECT_EQ(through(tuple), tuple);
  const Sample sample{torch::arange(5), "five", 0.25};
  EXPECT_EQ(through(sample), sample);
  const std::vector<Sample> samples{sample, {torch::ones({2, 2}), "", std::nullopt}};
  EXPECT_EQ(through(samples), samples);
  EXPECT_EQ(through(Words({"to", "be"})).list(), (std::vector<std::string>{"to", "be"}));
}

TEST(Comm, TensorsKeepBitsSizesAndDenseStrides) {
  const at::Tensor base = torch::randn({4, 6});
  const std::vector<at::Tensor> tensors{base,
                                        base.t(),
                                        base.slice(1, 1, 5, 2),
                                        torch::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
                                        torch::tensor(3.5),
                                        torch::empty({0, 3}),
                                        torch::tensor({true, false}),
                                        torch::randn({3}).to(at::kBFloat16),
                                        torch::randn({3}).to(at::kHalf),
                                        torch::randn({3}, at::kComplexDouble),
                                        torch::tensor({std::nan(""), -0.0, HUGE_VAL}),
                                        base[0].expand({3, 6}),
                                        torch::randn({3}, at::requires_grad())};
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor received = through(tensor);
    EXPECT_EQ(received.sizes(), tensor.sizes());
    EXPECT_EQ(received.strides(), tensor.detach().clone().strides());
    EXPECT_FALSE(received.requires_grad());
    expect_bit_equal(received, tensor.detach(), tensor.toString());
  }
  EXPECT_FALSE(through(at::Tensor()).defined());
  const at::Tensor conjugate = torch::randn({3}, at::kComplexFloat).conj();
  expect_bit_equal(through(conjugate), conjugate.resolve_conj(), "a lazy conjugate");
}

TEST(Comm, MessagesOfOnePairArriveInOrderWhateverTheRankTypeSays) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2}, [] {
    // Pipelines {0, 1} {2, 3}, replicas {0, 2} {1, 3}.
    if (pp_rank() == 0) {
      for (int i = 0; i < 20; ++i) send(100 * rank() + i, 1, i % 2 == 0 ? PP_RANK : MP_RANK);
    } else {
      for (int i = 0; i < 20; ++i) {
        EXPECT_EQ(recv_from<int>(rank() - 1, WORLD_RANK), 100 * (rank() - 1) + i);
      }
    }
    if (dp_rank() == 1) send("text", 0, DP_RANK);
    if (dp_rank() == 0) {
      EXPECT_EQ(recv_from<std::string>(1, RDP_RANK), "text");
    }
  });
}

TEST(Comm, BroadcastReachesTheMembersOfItsGroupOnly) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2}, [] {
    if (rank() == 1) {
      broadcast(at::scalar_tensor(7), WORLD);
    } else {
      EXPECT_EQ(recv_from<at::Tensor>(1, WORLD_RANK).item<int>(), 7);
    }
    if (pp_rank() == 1) {
      broadcast(rank(), PP_GROUP);
    } else {
      EXPECT_EQ(recv_from<int>(1, PP_RANK), rank() + 1);
    }
    broadcast(1.0, TP_GROUP);  // to nobody
  });
}

TEST(Comm, AllgatherIsByRankOfTheGroup) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2}, [] {
    EXPECT_EQ(allgather(rank(), WORLD), (std::vector<int>{0, 1, 2, 3}));
    EXPECT_EQ(allgather(std::to_string(rank()), DP_GROUP),
              (std::vector<std::string>{std::to_string(pp_rank()), std::to_string(pp_rank() + 2)}));
    EXPECT_EQ(allgather("me", TP_GROUP), std::vector<std::string>{"me"});
    const auto tensors = allgather(torch::full({rank()}, rank()), PP_GROUP);
    EXPECT_EQ(tensors.at(1).numel(), get_pp_group().at(1));
  });
}

TEST(Comm, GroupsAreValues) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2}, [] {
    const ProcessGroup some = new_group({3, 0, 2});
    const ProcessGroup copy = some;
    EXPECT_EQ(copy.ranks(), (std::vector<int>{3, 0, 2}));
    EXPECT_EQ(copy.size(), 3);
    EXPECT_EQ(copy.is_member(), rank() != 1);
    const at::Tensor own = at::scalar_tensor(static_cast<double>(rank()), at::kDouble);
    if (copy.is_member()) {
      EXPECT_EQ(copy.rank(), rank() == 3 ? 0 : rank() == 0 ? 1 : 2);
      EXPECT_EQ(allgather(rank(), copy), (std::vector<int>{3, 0, 2}));
      EXPECT_DOUBLE_EQ(all_reduce_mean(own, copy).item<double>(), 5.0 / 3);
      if (rank() == 0) {
        broadcast("hello", copy);
      } else {
        EXPECT_EQ(recv_from<std::string>(0, WORLD_RANK), "hello");
      }
      barrier(copy);
    }
    const ProcessGroup replicas = get_dp_process_group();
    EXPECT_EQ(replicas.ranks(), get_dp_group());
    EXPECT_EQ(replicas.rank(), dp_rank());
    EXPECT_DOUBLE_EQ(all_reduce_mean(own, replicas).item<double>(), pp_rank() + 1.0);
    EXPECT_EQ(get_pp_process_group().ranks(), get_pp_group());
    EXPECT_EQ(get_tp_process_group().size(), 1);
    EXPECT_EQ(get_world_process_group().size(), 4);
    EXPECT_EQ(get_mp_process_group().rank(), mp_rank());
    EXPECT_EQ(get_rdp_process_group().rank(), rdp_rank());
    mp_barrier(), dp_barrier(), pp_barrier(), tp_barrier(), rdp_barrier();
  });
}

std::string refusal(const std::function<void()>& call) { return message_of<c10::Error>(call); }

TEST(Comm, GroupsThatNobodyRefersToAreFreedWithTheNext) {
  run_smp_ranks(3, {}, [] {
    const auto num_groups = [] { return engine::context("test").made_groups->size(); };
    const ProcessGroup kept = new_group({2, 0});
    for (int i = 0; i < 5; ++i) {
      const ProcessGroup group = new_group({0, 1});
      if (group.is_member()) barrier(group);
      EXPECT_EQ(num_groups(), 2);
    }
    std::optional<ProcessGroup> of_one;
    {
      const ProcessGroup group = new_group({0, 1});
      if (rank() == 1) of_one = group;
    }
    new_group({2});
    EXPECT_EQ(num_groups(), 3) << "a member still refers to {0, 1}";
    of_one.reset();
    new_group({2});
    EXPECT_EQ(num_groups(), 2);
    if (kept.is_member()) {
      EXPECT_EQ(allgather(rank(), kept), (std::vector<int>{2, 0}));
    }
  });
}

TEST(Comm, AnotherTypeThanWasSentIsNamedAndTheNextMessageArrives) {
  run_smp_ranks(2, {}, [] {
    if (rank() == 0) {
      send(std::vector<double>{1, 2}, 1, WORLD_RANK);
      send(5, 1, WORLD_RANK);
      return;
    }
    const std::string message = message_of<c10::TypeError>([] { recv_from<std::map<std::string, int>>(0, WORLD_RANK); });
    EXPECT_TRUE(contains(
        message, "expected an object of type std::map<std::string, int> from rank 0, got one of type std::vector<double>"))
        << message;
    EXPECT_EQ(recv_from<int>(0, WORLD_RANK), 5);
  });
}

TEST(Comm, DifferentTypesInAllgatherAreRefusedOnEveryRank) {
  run_smp_ranks(3, {}, [] {
    const std::string message = message_of<c10::TypeError>([] {
      if (rank() == 1) {
        allgather(1.0, WORLD);
      } else {
        allgather(1, WORLD);
      }
    });
    EXPECT_TRUE(contains(message, "int") && contains(message, "double")) << message;
    EXPECT_EQ(allgather(rank(), WORLD), (std::vector<int>{0, 1, 2}));
  });
}

TEST(Comm, PartnersThatDoNotExistAreRefusedBeforeAnythingIsSent) {
  run_smp_ranks(4, {.pipeline_parallel_degree = 2}, [] {
    EXPECT_TRUE(contains(refusal([] { send(1, 4, WORLD_RANK); }), "smp::send: expected a WORLD_RANK of 0 ... 3, got 4"));
    EXPECT_TRUE(contains(refusal([] { send(1, -1, DP_RANK); }), "expected a DP_RANK of 0 ... 1, got -1"));
    EXPECT_TRUE(contains(refusal([] { recv_from<int>(2, PP_RANK); }), "smp::recv_from: expected a PP_RANK of 0 ... 1"));
    EXPECT_TRUE(contains(refusal([] { send(1, rank(), WORLD_RANK); }), "expected another rank than the calling one"));
    EXPECT_TRUE(contains(refusal([] { recv_from<int>(0, TP_RANK); }), "which is rank " + std::to_string(rank())));
    EXPECT_TRUE(contains(refusal([] { send(1, 0, static_cast<RankType>(9)); }), "RankType: expected one of"));
    EXPECT_TRUE(contains(refusal([] { barrier(static_cast<CommGroup>(9)); }), "CommGroup: expected one of"));
  });
}

TEST(Comm, WhatCannotTravelIsRefused) {
  run_smp_ranks(2, {}, [] {
    if (rank() == 1) return;
    EXPECT_TRUE(contains(refusal([] { send(torch::eye(2).to_sparse(), 1, WORLD_RANK); }),
                         "expected a dense CPU tensor, got SparseCPUFloatType"));
    EXPECT_TRUE(contains(refusal([] { send(torch::empty({2}, at::kMeta), 1, WORLD_RANK); }), "expected a dense CPU tensor"));
  });
}

TEST(Comm, ASerialiserThatReadsLessThanItWroteIsRefused) {
  run_smp_ranks(2, {}, [] {
    if (rank() == 0) return send(ReadsTooLittle(), 1, WORLD_RANK);
    EXPECT_TRUE(contains(refusal([] { recv_from<ReadsTooLittle>(0, WORLD_RANK); }), "got some left"));
  });
}

TEST(Comm, ListsThatAreNoGroupsAreRefusedOnAllRanks) {
  run_smp_ranks(3, {}, [] {
    EXPECT_TRUE(contains(refusal([] { new_group({}); }), "expected at least one rank, got none"));
    EXPECT_TRUE(contains(refusal([] { new_group({0, 3}); }), "expected ranks of 0 ... 2, got 3 in {0, 3}"));
    EXPECT_TRUE(contains(refusal([] { new_group({1, 1}); }), "expected each rank once, got 1 several times"));
    EXPECT_TRUE(contains(refusal([] { new_group(rank() == 2 ? std::vector<int>{0, 1} : std::vector<int>{0, 2}); }),
                         "expected the same list on all ranks, got {0, 2} on rank 0 and {0, 1} on rank 2"));
    barrier();
  });
}

TEST(Comm, AnOutsiderOfAGroupIsToldSo) {
  run_smp_ranks(3, {}, [] {
    const ProcessGroup pair = new_group({0, 2});
    if (rank() == 1) {
      const std::string wanted = "expected a call on a member of the process group {0, 2}, got one on rank 1";
      EXPECT_TRUE(contains(refusal([&] { barrier(pair); }), "smp::barrier: " + wanted));
      EXPECT_TRUE(contains(refusal([&] { broadcast(1, pair); }), "smp::broadcast: " + wanted));
      EXPECT_TRUE(contains(refusal([&] { allgather(1, pair); }), "smp::allgather: " + wanted));
      EXPECT_TRUE(contains(refusal([&] { all_reduce_mean(torch::ones({1}), pair); }), "smp::all_reduce_mean: " + wanted));
      EXPECT_TRUE(contains(refusal([&] { pair.rank(); }), wanted));
    } else {
      barrier(pair);
    }
    barrier();
  });
}

// Two pieces of one tensor may be as long as two tensors.
TEST(Comm, MeansOfOtherSizesOrTypesAreRefusedOnAllRanks) {
  run_smp_ranks(2, {}, [] {
    const at::Tensor other = rank() == 0 ? torch::ones({4}) : torch::ones({2}, at::kDouble);
    for (const at::Tensor& mine : {torch::ones({131072 * (1 + 2 * rank())}), other}) {
      const std::string text = refusal([&] { all_reduce_mean(mine, CommGroup::WORLD); });
      EXPECT_TRUE(contains(text, "all_reduce_mean: expected tensors of one size and type")) << rank() << ": " << text;
    }
    EXPECT_DOUBLE_EQ(all_reduce_mean(torch::full({1}, 1.0 * rank()), CommGroup::WORLD).item<double>(), 0.5);
  });
}

TEST(Comm, AGroupOfAnEndedJobAndACallBeforeInitAreRefused) {
  std::optional<ProcessGroup> kept;
  run_smp_ranks(1, {}, [&] { kept = new_group({0}); });
  run_smp_ranks(1, {}, [&] { EXPECT_TRUE(contains(refusal([&] { barrier(*kept); }), "one that smp::shutdown has ended")); });
  EXPECT_TRUE(contains(refusal([] { send(1, 1, WORLD_RANK); }), "smp::send: expected smp::init() to have been called"));
  EXPECT_TRUE(contains(refusal([] { get_dp_process_group(); }), "expected smp::init() to have been called"));
}

}  // namespace
}  // namespace smp
