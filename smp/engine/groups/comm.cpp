// Groups as values, and objects between ranks.
#include "smp/comm.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>

#include "runtime/device/device.h"
#include "runtime/exchange/object_messages.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/checks.h"
#include "smp/engine/context/call.h"
#include "smp/engine/context/context.h"
#include "smp/engine/groups/made_group.h"

namespace smp {

using engine::context;
using engine::GroupUse;
using engine::kind_of;

namespace {

constexpr const char* kRankTypes[] = {"WORLD_RANK", "MP_RANK", "DP_RANK", "PP_RANK", "TP_RANK", "RDP_RANK"};

// World rank of the partner of this rank. Throws for ranks that do not exist and for this one.
int partner(const char* caller, int rank, RankType rank_type) {
  const engine::Context& own = context(caller);
  own.check_laid_out(kind_of(rank_type), caller);
  const std::vector<int> ranks = own.topology.group(kind_of(rank_type), own.world->rank());
  const char* name = kRankTypes[static_cast<size_t>(rank_type)];
  TORCH_CHECK_VALUE(rank >= 0 && rank < static_cast<int>(ranks.size()), caller, ": expected a ", name, " of 0 ... ",
                    ranks.size() - 1, ", got ", rank, ". It counts the ranks of the world, or those of your own group.");
  const int found = ranks[static_cast<size_t>(rank)];
  TORCH_CHECK_VALUE(found != own.world->rank(), caller, ": expected another rank than the calling one, got ", name, " ",
                    rank, ", which is rank ", found, " itself. It has the object already.");
  return found;
}

// A message says what it holds.
std::string with_type(const std::string& bytes, const std::string& type) {
  Writer out;
  out.put(type);
  out.put_bytes(bytes.data(), bytes.size());
  return out.take();
}

std::string without_type(const std::string& message, const std::string& type, const std::string& caller, int source) {
  Reader in(message);
  const auto sent = in.get<std::string>();
  TORCH_CHECK_TYPE(sent == type, caller, ": expected an object of type ", type, " from rank ", source, ", got one of type ",
                   sent, ". Give and take the same type on both ranks.");
  return message.substr(sizeof(uint64_t) + sent.size());
}

// On both ranks, whichever calls what.
std::string object_from(int source, int dest) {
  return "hand-over of an object from rank " + std::to_string(source) + " to rank " + std::to_string(dest) +
         " (send, broadcast, recv_from)";
}

// Bytes go out before the others are heard: one receiver may wait for another one that has them already. Who is in another
// call takes none of them.
void hand_over(const std::vector<int>& dests, const std::string& message, const std::string& operation) {
  engine::Context& own = context("smp::send");
  const engine::InCall in_call(own, "send");
  for (const int dest : dests) own.calls.tell(dest, object_from(own.world->rank(), dest));
  runtime::hand_over(*own.world, dests, message, operation, [&](int dest) {
    own.calls.hear(dest, operation + ", which waits until rank " + std::to_string(dest) + " calls recv_from");
  });
}

void check_list(const std::vector<int>& ranks, int world_size) {
  TORCH_CHECK_VALUE(!ranks.empty(), "smp::new_group: expected at least one rank, got none.");
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < world_size, "smp::new_group: expected ranks of 0 ... ", world_size - 1, ", got ",
                      rank, " in ", runtime::text_of(ranks), ".");
    TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, "smp::new_group: expected each rank once, got ",
                      rank, " several times in ", runtime::text_of(ranks), ".");
  }
}

ProcessGroup group_of_kind(CommGroup kind, const char* caller) {
  context(caller);
  return kind;
}

}  // namespace

std::vector<int> ProcessGroup::ranks() const { return GroupUse("ProcessGroup", *this).ranks(); }
int ProcessGroup::size() const { return static_cast<int>(ranks().size()); }
bool ProcessGroup::is_member() const { return GroupUse("ProcessGroup", *this).is_member(); }
int ProcessGroup::rank() const { return GroupUse("ProcessGroup", *this).rank(); }

ProcessGroup new_group(const std::vector<int>& ranks) {
  engine::refuse_in_body("smp::new_group");
  engine::refuse_in_join("smp::new_group");
  engine::Context& own = context("smp::new_group");
  check_list(ranks, own.world->size());
  Writer out;
  out.put(runtime::text_of(ranks));
  out.put(own.made_groups->ended());
  std::vector<std::string> lists;
  std::vector<std::vector<uint64_t>> ended;
  const std::vector<std::string> all =
      engine::in_call(own, "new_group", runtime::GroupKind::kWorld, [&] { return own.world->all_gather(out.take()); });
  for (const std::string& bytes : all) {
    Reader in(bytes);
    lists.push_back(in.get<std::string>());
    ended.push_back(in.get<std::vector<uint64_t>>());
  }
  for (size_t r = 0; r < lists.size(); ++r) {
    TORCH_CHECK_VALUE(lists[r] == lists[0], "smp::new_group: expected the same list on all ranks, got ", lists[0],
                      " on rank 0 and ", lists[r], " on rank ", r, ". Call it on every rank, members or not.");
  }
  return GroupUse::value_of(engine::MadeGroups::add(own.made_groups, ranks, ended));
}

ProcessGroup get_world_process_group() { return group_of_kind(CommGroup::WORLD, "smp::get_world_process_group"); }
ProcessGroup get_mp_process_group() { return group_of_kind(CommGroup::MP_GROUP, "smp::get_mp_process_group"); }
ProcessGroup get_dp_process_group() { return group_of_kind(CommGroup::DP_GROUP, "smp::get_dp_process_group"); }
ProcessGroup get_pp_process_group() { return group_of_kind(CommGroup::PP_GROUP, "smp::get_pp_process_group"); }
ProcessGroup get_tp_process_group() { return group_of_kind(CommGroup::TP_GROUP, "smp::get_tp_process_group"); }
ProcessGroup get_rdp_process_group() { return group_of_kind(CommGroup::RDP_GROUP, "smp::get_rdp_process_group"); }

void barrier(const ProcessGroup& group) {
  engine::refuse_in_body("smp::barrier");
  const GroupUse use("smp::barrier", group);
  runtime::Transport& transport = use.transport();
  engine::in_call(context("smp::barrier"), use.name_of("barrier"), use.ranks(), [&] { transport.barrier(); });
}
void mp_barrier() { barrier(CommGroup::MP_GROUP); }
void dp_barrier() { barrier(CommGroup::DP_GROUP); }
void pp_barrier() { barrier(CommGroup::PP_GROUP); }
void tp_barrier() { barrier(CommGroup::TP_GROUP); }
void rdp_barrier() { barrier(CommGroup::RDP_GROUP); }

at::Tensor all_reduce_mean(const at::Tensor& tensor, const ProcessGroup& group) {
  engine::refuse_in_body("smp::all_reduce_mean", "Return the tensor from the body and reduce what the step returns.");
  const GroupUse use("smp::all_reduce_mean", group);
  runtime::Transport& transport = use.transport();
  TORCH_CHECK_VALUE(runtime::is_within_reach(tensor) && tensor.is_floating_point(),
                    "all_reduce_mean: expected a floating-point tensor of the CPU or the rank's device, got ",
                    tensor.defined() ? tensor.toString() : "an undefined one", ". Convert it first: tensor.to(at::kFloat).");
  at::Tensor mean = tensor.detach().clone(at::MemoryFormat::Contiguous);
  engine::in_call(context("smp::all_reduce_mean"), use.name_of("all_reduce_mean"), use.ranks(), [&] {
    // A sum does not see all differences: parts of several tensors may have the lengths of one.
    const std::string own = c10::str(tensor.numel(), " elements of ", tensor.scalar_type(), " on ", tensor.device().type());
    for (const std::string& other : transport.all_gather(own)) {
      TORCH_CHECK_VALUE(
          other == own,
          "all_reduce_mean: expected tensors of one size and type, on one kind of device, on all ranks of the group, got ",
          own, " on this rank and ", other, " on another. Call it with the same tensors in the same order.");
    }
    runtime::keeping(std::make_shared<at::Tensor>(mean),
                     [&] { transport.all_reduce_sum(runtime::memory_of(mean), mean.scalar_type()); });
  });
  return mean.div_(transport.size());
}

namespace comm_internal {

void check_call(const char* caller) {
  engine::refuse_in_body(caller);
  context(caller);
}

void send_bytes(const std::string& bytes, const std::string& type, int dest, RankType rank_type) {
  const int rank = partner("smp::send", dest, rank_type);
  hand_over({rank}, with_type(bytes, type), "smp::send of " + type);
}

std::string receive_bytes(const std::string& type, int source, RankType rank_type) {
  const int rank = partner("smp::recv_from", source, rank_type);
  engine::Context& own = context("smp::recv_from");
  const engine::InCall in_call(own, "recv_from");
  const std::string action = "smp::recv_from of " + type;
  own.calls.tell(rank, object_from(rank, own.world->rank()));
  own.calls.hear(rank, action + ", which waits until rank " + std::to_string(rank) + " sends it");
  return without_type(runtime::take_over(*own.world, rank, action), type, "smp::recv_from", rank);
}

void broadcast_bytes(const std::string& bytes, const std::string& type, const ProcessGroup& group) {
  const GroupUse use("smp::broadcast", group);
  use.transport();  // throws on a rank that is no member
  std::vector<int> others = use.ranks();
  std::erase(others, rank());
  hand_over(others, with_type(bytes, type), "smp::broadcast of " + type);
}

std::vector<std::string> all_gather_bytes(const std::string& bytes, const std::string& type, const ProcessGroup& group,
                                          std::string_view call) {
  const GroupUse use("smp::allgather", group);
  const std::vector<int> ranks = use.ranks();
  runtime::Transport& transport = use.transport();
  std::vector<std::string> gathered =
      engine::in_call(context("smp::allgather"), call.empty() ? use.name_of("allgather") : std::string(call), ranks,
                      [&] { return transport.all_gather(with_type(bytes, type)); });
  for (size_t r = 0; r < gathered.size(); ++r) {
    gathered[r] = without_type(gathered[r], type, "smp::allgather", ranks[r]);
  }
  return gathered;
}

}  // namespace comm_internal
}  // namespace smp
