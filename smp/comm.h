// What ranks may send each other outside of steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "smp/init.h"
#include "smp/process_group.h"
#include "smp/serialiser.h"

namespace smp {

// Everything below throws c10::Error before init, c10::ValueError within a step body (which only pp_rank() 0 runs) and for
// a group that this rank does not belong to. A partner that does not come is a std::runtime_error after five times
// Config::timeout_s, which names both sides and ends the job.

/// The group of these ranks of the world, numbered anew in this order. Collective over the world: all ranks, members or
/// not, call it with the same list, else all throw c10::ValueError. Also throws it for an empty list, a rank out of range
/// and one that comes twice. A group holds one of MPI's some 65,000 communicators until all its members have let the last
/// copy of the value go and any group is made after that.
ProcessGroup new_group(const std::vector<int>& ranks);

/// My group of that kind as a value.
ProcessGroup get_world_process_group();
ProcessGroup get_mp_process_group();
ProcessGroup get_dp_process_group();
ProcessGroup get_pp_process_group();
ProcessGroup get_tp_process_group();
ProcessGroup get_rdp_process_group();

/// Returns when every rank of the group has called it.
void barrier(const ProcessGroup& group = CommGroup::WORLD);
void mp_barrier();
void dp_barrier();
void pp_barrier();
void tp_barrier();
void rdp_barrier();

/// Mean of `tensor` over the ranks of the group, the same bits on each; a new tensor of the same shape. float32, float64,
/// bfloat16, half. Collective over the group. Throws c10::ValueError for other tensors, and on all ranks where they differ.
at::Tensor all_reduce_mean(const at::Tensor& tensor, const ProcessGroup& group = CommGroup::DP_GROUP);

namespace comm_internal {

/// Throws where no message may be sent, before an object is written.
void check_call(const char* caller);
void send_bytes(const std::string& bytes, const std::string& type, int dest, RankType rank_type);
/// Throws c10::TypeError unless what was sent is of `type`.
std::string receive_bytes(const std::string& type, int source, RankType rank_type);
void broadcast_bytes(const std::string& bytes, const std::string& type, const ProcessGroup& group);
/// call: what it is a part of on all ranks of the group, if it is.
std::vector<std::string> all_gather_bytes(const std::string& bytes, const std::string& type, const ProcessGroup& group,
                                          std::string_view call = {});

/// Texts of any kind travel as std::string.
template <class T>
using Sent = std::conditional_t<std::is_convertible_v<const T&, std::string_view>, std::string, T>;

template <class T>
std::string bytes_of(const T& object) {
  Writer out;
  if constexpr (std::is_same_v<Sent<T>, T>) {
    out.put(object);
  } else {
    out.put(std::string(std::string_view(object)));
  }
  return out.take();
}
template <class T>
T object_of(const std::string& bytes) {
  Reader in(bytes);
  T object = in.get<T>();
  in.expect_end(type_name<T>(), "message");
  return object;
}

}  // namespace comm_internal

/// Gives `object` to another rank, and returns when it has called recv_from. Any type with a Serialiser: tensors (sizes,
/// dtype, bits and the strides of dense ones are kept, gradients are not), strings, numbers, containers, structs with
/// Fields. Two ranks that send to each other at the same time are refused: let one receive first.
///
///   if (smp::rank() == 0) smp::send(vocabulary, 1, smp::WORLD_RANK);
///   if (smp::rank() == 1) vocabulary = smp::recv_from<Vocabulary>(0, smp::WORLD_RANK);
///
/// Throws c10::ValueError for a rank out of range and for this rank itself.
template <class T>
void send(const T& object, int dest_rank, RankType rank_type) {
  comm_internal::check_call("smp::send");
  comm_internal::send_bytes(comm_internal::bytes_of(object), type_name<comm_internal::Sent<T>>(), dest_rank, rank_type);
}

/// The next object that `src_rank` sends or broadcasts to this rank. Throws c10::TypeError, naming both types, when it is
/// no T, and c10::ValueError as send does.
template <class T>
T recv_from(int src_rank, RankType rank_type) {
  comm_internal::check_call("smp::recv_from");
  return comm_internal::object_of<T>(comm_internal::receive_bytes(type_name<T>(), src_rank, rank_type));
}

/// Gives `object` to all other members of the group, which call recv_from, and returns when they have. On the giving rank
/// only.
///
///   if (smp::pp_rank() == 0) smp::broadcast(length, smp::PP_GROUP);
///   else length = smp::recv_from<int64_t>(0, smp::PP_RANK);
template <class T>
void broadcast(const T& object, const ProcessGroup& group) {
  comm_internal::check_call("smp::broadcast");
  comm_internal::broadcast_bytes(comm_internal::bytes_of(object), type_name<comm_internal::Sent<T>>(), group);
}

/// The objects of all members, by rank of the group. Collective over the group. Throws c10::TypeError, on every rank, when
/// they are not of one type.
template <class T>
std::vector<comm_internal::Sent<T>> allgather(const T& object, const ProcessGroup& group) {
  using Object = comm_internal::Sent<T>;
  comm_internal::check_call("smp::allgather");
  std::vector<Object> objects;
  for (const std::string& bytes :
       comm_internal::all_gather_bytes(comm_internal::bytes_of(object), type_name<Object>(), group)) {
    objects.push_back(comm_internal::object_of<Object>(bytes));
  }
  return objects;
}

}  // namespace smp
