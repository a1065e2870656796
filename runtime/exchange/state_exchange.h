// Brings named tensors that ranks were given, in any split over a pipeline, to the ranks that hold them.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "partitioner/plan/home.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

/// The bytes of every pipeline rank of replica 0, by pipeline rank, on every rank of the job. What
/// the other replicas pass does not count. Collective over both groups.
std::vector<std::string> gather_from_first_replica(std::string_view bytes, Transport& pipeline, Transport& replicas);

/// A copy on every rank of `group` of a tensor that rank `owner` has; the others' `tensor` does not count. `what` it is part
/// of is named where a message is damaged. Collective over the group.
at::Tensor copy_on_all(const at::Tensor& tensor, int owner, Transport& group, std::string_view what);

/// What the pipeline ranks of replica 0 offer together: full dictionaries, parts of one, or nothing on some ranks. Every
/// rank of the job knows of all offers, so that every rank finds the same errors, before any data move.
///
///   StateExchange exchange(own, own_error, pipeline, replicas);   // collective
///   TORCH_CHECK_VALUE(exchange.error().empty(), exchange.error());
///   at::Tensor weight = exchange.deliver("weight", home);         // collective; defined on the home's ranks
class StateExchange {
 public:
  struct Offer {
    c10::ScalarType dtype = c10::ScalarType::Undefined;
    std::vector<int64_t> sizes{};
    uint64_t content = 0;      // hash of the bytes
    std::vector<int> ranks{};  // pipeline ranks that have it, ascending, each of them all of it
  };

  /// What one rank offers, and why it offers nothing, if it does not.
  struct Offered {
    std::string error{};
    std::map<std::string, Offer> offers{};  // without ranks
  };
  static std::string encode(const std::map<std::string, at::Tensor>& own, const std::string& own_error);
  /// Throws std::runtime_error for bytes that encode() did not write.
  static Offered decode(std::string_view bytes);

  /// own: CPU tensors by name. own_error: why this rank has nothing to offer, for everybody. Collective over both groups.
  /// Shares the groups, since a delivery may wait for a step.
  StateExchange(std::map<std::string, at::Tensor> own, const std::string& own_error, std::shared_ptr<Transport> pipeline,
                std::shared_ptr<Transport> replicas);

  /// What a rank could not offer, or two ranks offer differently; empty when all is well. The same on every rank.
  const std::string& error() const { return error_; }
  const std::map<std::string, Offer>& offers() const { return offers_; }
  /// The contiguous tensor of an offer on the pipeline ranks of `home` in every replica, undefined elsewhere. These may
  /// share it with the dictionary it came from. Collective over both groups.
  at::Tensor deliver(const std::string& name, const partitioner::TensorHome& home);

 private:
  void add_offers(const Offered& offered, int pipeline_rank);
  at::Tensor from_pipeline(const std::string& name, const Offer& offer, const partitioner::TensorHome& home);

  std::map<std::string, at::Tensor> own_;
  std::shared_ptr<Transport> pipeline_, replicas_;
  std::map<std::string, Offer> offers_;
  std::string error_;
};

}  // namespace smp::runtime
