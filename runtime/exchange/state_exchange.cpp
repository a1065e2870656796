// Offers are compared by their hash; data travel tensor by tensor, so that no rank needs room for more than one.
#include "runtime/exchange/state_exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "partitioner/graph/tensor_bytes.h"
#include "runtime/device/device.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {
namespace {

constexpr partitioner::Shard kWhole;  // what dictionaries have of each tensor

bool contains(const std::vector<int>& ranks, int rank) { return std::find(ranks.begin(), ranks.end(), rank) != ranks.end(); }

}  // namespace

at::Tensor copy_on_all(const at::Tensor& tensor, int owner, Transport& group, std::string_view what) {
  if (owner != group.rank()) return read_tensor(group.receive_bytes(owner, kStateTag), what);
  const at::Tensor on_host = tensor.detach().to(host().type);
  WireWriter out;
  out.put(on_host);
  const std::string bytes = out.take();
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != owner) group.send_bytes(rank, kStateTag, bytes);
  }
  return on_host.clone();
}

std::vector<std::string> gather_from_first_replica(std::string_view bytes, Transport& pipeline, Transport& replicas) {
  const bool counts = replicas.rank() == 0;
  std::vector<std::string> gathered;
  if (counts) gathered = pipeline.all_gather(bytes);
  if (replicas.size() == 1) return gathered;
  WireWriter out;
  out.put(gathered);
  const std::string all = replicas.all_gather(counts ? out.take() : std::string()).front();
  return read_all(all, "texts of the first replica", [](WireReader& in) {
    std::vector<std::string> texts;
    in.get_into(std::tie(texts));
    return texts;
  });
}

std::string StateExchange::encode(const std::map<std::string, at::Tensor>& own, const std::string& own_error) {
  WireWriter out;
  out.put(own_error);
  for (const auto& [name, tensor] : own) {
    out.put(name);
    out.put(tensor.scalar_type());
    out.put(tensor.sizes().vec());
    out.put(kWhole.index), out.put(kWhole.count);
    out.put(static_cast<uint64_t>(std::hash<std::string_view>()(bytes_of(tensor))));
  }
  return out.take();
}

StateExchange::Offered StateExchange::decode(std::string_view bytes) {
  return read_all(bytes, "offers of a state", [](WireReader& in) {
    Offered offered{.error = in.get_string()};
    while (!in.at_end()) {
      const std::string name = in.get_string();
      Offer offer{.dtype = in.get_dtype()};
      in.get_into(std::tie(offer.sizes));
      if (const partitioner::Shard shard{in.get<int32_t>(), in.get<int32_t>()}; !shard.is_whole()) {
        throw std::runtime_error("offers of a state: expected whole tensors, got part " + std::to_string(shard.index) +
                                 " of " + std::to_string(shard.count) + " of '" + name +
                                 "'. Start one version of smp on all ranks.");
      }
      offer.content = in.get<uint64_t>();
      if (!partitioner::dense_bytes(offer.sizes, offer.dtype)) {
        throw std::runtime_error("offers of a state: expected sizes of a tensor for '" + name + "', got " +
                                 c10::str(at::IntArrayRef(offer.sizes)));
      }
      offered.offers.insert_or_assign(name, std::move(offer));
    }
    return offered;
  });
}

StateExchange::StateExchange(std::map<std::string, at::Tensor> own, const std::string& own_error,
                             std::shared_ptr<Transport> pipeline, std::shared_ptr<Transport> replicas)
    : own_(std::move(own)), pipeline_(std::move(pipeline)), replicas_(std::move(replicas)) {
  std::string offers;
  try {
    for (auto& [name, tensor] : own_) tensor = tensor.detach().contiguous();
    offers = encode(own_, own_error);
  } catch (const c10::Error& error) {  // of a tensor without data here; the others wait for what this rank offers
    own_.clear();
    offers = encode(own_, error.what_without_backtrace());
  }
  const std::vector<std::string> all = gather_from_first_replica(offers, *pipeline_, *replicas_);
  for (size_t r = 0; r < all.size(); ++r) add_offers(decode(all[r]), static_cast<int>(r));
}

void StateExchange::add_offers(const Offered& offered, int pipeline_rank) {
  if (error_.empty()) error_ = offered.error;
  for (const auto& [name, offer] : offered.offers) {
    Offer& known = offers_.try_emplace(name, offer).first->second;
    known.ranks.push_back(pipeline_rank);
    const bool agrees = known.dtype == offer.dtype && known.sizes == offer.sizes && known.content == offer.content;
    if (agrees || !error_.empty()) continue;
    error_ = "expected one state on all ranks, got another '" + name + "' on pipeline rank " +
             std::to_string(pipeline_rank) + " than on " + std::to_string(known.ranks.front()) +
             ". Read the same save on every rank.";
  }
}

at::Tensor StateExchange::from_pipeline(const std::string& name, const Offer& offer, const partitioner::TensorHome& home) {
  const int me = pipeline_->rank(), source = offer.ranks.front();
  if (me == source) {
    for (const int holder : home.whole_on()) {
      if (contains(offer.ranks, holder)) continue;
      pipeline_->send_bytes(holder, kStateTag, bytes_of(own_.at(name)));
    }
  }
  if (!home.is_on(me)) return {};
  if (contains(offer.ranks, me)) return own_.at(name);
  const std::string bytes = pipeline_->receive_bytes(source, kStateTag);
  TORCH_INTERNAL_ASSERT(bytes.size() == static_cast<size_t>(*partitioner::dense_bytes(offer.sizes, offer.dtype)), "'", name,
                        "' came with another size than it was offered with");
  at::Tensor tensor = host().empty(offer.sizes, offer.dtype);
  set_bytes(tensor, bytes);
  return tensor;
}

at::Tensor StateExchange::deliver(const std::string& name, const partitioner::TensorHome& home) {
  const Offer& offer = offers_.at(name);
  at::Tensor tensor;
  if (replicas_->rank() == 0) tensor = from_pipeline(name, offer, home);
  if (replicas_->size() == 1 || !home.is_on(pipeline_->rank())) return tensor;
  if (replicas_->rank() > 0) tensor = host().empty(offer.sizes, offer.dtype);
  keeping(std::make_shared<at::Tensor>(tensor), [&] { replicas_->broadcast(memory_of(tensor), 0); });
  return tensor;
}

}  // namespace smp::runtime
