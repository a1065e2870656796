// From the group that a caller names to the transport of this rank.
#include "smp/engine/groups/made_group.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/transport/checks.h"
#include "smp/engine/context/context.h"

namespace smp::engine {

namespace {

// All three name the same kinds in one order.
constexpr bool is_one_kind(CommGroup group, RankType rank_type, runtime::GroupKind kind) {
  return static_cast<int>(group) == static_cast<int>(kind) && static_cast<int>(rank_type) == static_cast<int>(kind);
}
static_assert(is_one_kind(CommGroup::WORLD, RankType::WORLD_RANK, runtime::GroupKind::kWorld) &&
              is_one_kind(CommGroup::MP_GROUP, RankType::MP_RANK, runtime::GroupKind::kModelParallel) &&
              is_one_kind(CommGroup::DP_GROUP, RankType::DP_RANK, runtime::GroupKind::kDataParallel) &&
              is_one_kind(CommGroup::PP_GROUP, RankType::PP_RANK, runtime::GroupKind::kPipeline) &&
              is_one_kind(CommGroup::TP_GROUP, RankType::TP_RANK, runtime::GroupKind::kTensor) &&
              is_one_kind(CommGroup::RDP_GROUP, RankType::RDP_RANK, runtime::GroupKind::kReducedData));

runtime::GroupKind kind_of(int enumerator, const char* type) {
  TORCH_CHECK_VALUE(enumerator >= 0 && enumerator <= static_cast<int>(runtime::GroupKind::kReducedData), type,
                    ": expected one of its enumerators, got ", enumerator, ".");
  return static_cast<runtime::GroupKind>(enumerator);
}

// Other replicas may have left the loop, or be at another step of it.
void check_outside_join(const Context& own, const char* caller, const std::vector<int>& ranks) {
  if (!own.join || own.is_in_step) return;
  const std::vector<int> mine = own.topology.group(runtime::GroupKind::kPipeline, own.world->rank());
  const bool is_own_replica =
      std::all_of(ranks.begin(), ranks.end(), [&](int rank) { return std::count(mine.begin(), mine.end(), rank) > 0; });
  TORCH_CHECK_VALUE(is_own_replica, caller,
                    ": expected a group within one pipeline in the loop of smp::join, got one with ranks of other replicas, "
                    "which may have left the loop. Call it after smp::join.");
}

constexpr const char* kGroups[] = {"WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP"};

}  // namespace

runtime::GroupKind kind_of(CommGroup group) { return kind_of(static_cast<int>(group), "CommGroup"); }
runtime::GroupKind kind_of(RankType rank_type) { return kind_of(static_cast<int>(rank_type), "RankType"); }

std::vector<uint64_t> MadeGroups::ended() const {
  std::vector<uint64_t> numbers;
  for (const Group& group : groups_) {
    if (group.value.expired()) numbers.push_back(group.number);
  }
  return numbers;
}

std::shared_ptr<MadeGroup> MadeGroups::add(const std::shared_ptr<MadeGroups>& groups, const std::vector<int>& ranks,
                                           const std::vector<std::vector<uint64_t>>& all_ended) {
  groups->free(all_ended);
  runtime::Transport& world = *groups->world_;
  auto made = std::make_shared<MadeGroup>(MadeGroup{.number = groups->num_made_++, .ranks = ranks});
  made->job = groups;
  made->is_member = std::count(ranks.begin(), ranks.end(), world.rank()) == 1;
  const auto transport = made->is_member ? world.group(ranks) : nullptr;
  made->transport = transport;
  groups->groups_.push_back({made->number, ranks, transport, made});
  return made;
}

void MadeGroups::free(const std::vector<std::vector<uint64_t>>& all_ended) {
  std::erase_if(groups_, [&](const Group& group) {
    const bool is_over = std::all_of(group.ranks.begin(), group.ranks.end(), [&](int rank) {
      const auto& ended = all_ended[static_cast<size_t>(rank)];
      return std::binary_search(ended.begin(), ended.end(), group.number);
    });
    if (is_over && group.transport) group.transport->end_group();
    return is_over;
  });
}

GroupUse::GroupUse(const char* caller, const ProcessGroup& group) : caller_(caller), kind_(group.kind_) {
  context(caller);
  if (group.made_ == nullptr) return;
  made_ = group.made_;
  TORCH_CHECK_VALUE(!made_->job.expired(), caller, ": expected a process group of this job, got one that smp::shutdown has ",
                    "ended. Make it anew after smp::init.");
}

std::vector<int> GroupUse::ranks() const {
  if (made_ != nullptr) return made_->ranks;
  const Context& own = context(caller_);
  own.check_laid_out(kind_of(kind_), caller_);
  return own.topology.group(kind_of(kind_), own.world->rank());
}

void GroupUse::check_is_member() const {
  const std::vector<int> members = ranks();
  const int own = context(caller_).world->rank();
  TORCH_CHECK_VALUE(std::count(members.begin(), members.end(), own) == 1, caller_,
                    ": expected a call on a member of the process group ", runtime::text_of(members), ", got one on rank ",
                    own, ". Ask group.is_member() first.");
}

int GroupUse::rank() const {
  check_is_member();
  const std::vector<int> members = ranks();
  const auto place = std::find(members.begin(), members.end(), context(caller_).world->rank());
  return static_cast<int>(place - members.begin());
}

runtime::Transport& GroupUse::transport() const {
  const Context& own = context(caller_);
  check_outside_join(own, caller_, ranks());
  check_is_member();
  return made_ == nullptr ? own.group(kind_of(kind_)) : *made_->transport.lock();  // which the job holds as well
}

std::string GroupUse::name_of(std::string_view call) const {
  const std::string group = made_ == nullptr ? kGroups[static_cast<size_t>(kind_)]
                                             : "group " + std::to_string(made_->number) + " " + runtime::text_of(ranks());
  return std::string(call) + " of " + group;
}

}  // namespace smp::engine
