// Offers are compared by their hash; data travel tensor by tensor, so that no rank needs room for
// more than one.
#include "runtime/state_exchange.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/tags.h"
#include "runtime/wire.h"

namespace smp::runtime {
namespace {

std::string_view bytes_of(const at::Tensor& contiguous) {
  return {static_cast<const char*>(contiguous.const_data_ptr()), contiguous.nbytes()};
}

std::string encode(const std::map<std::string, at::Tensor>& own, const std::string& own_error) {
  WireWriter out;
  out.put(own_error);
  for (const auto& [name, tensor] : own) {
    out.put(name);
    out.put(static_cast<int8_t>(tensor.scalar_type()));
    out.put(static_cast<uint32_t>(tensor.dim()));
    for (const int64_t size : tensor.sizes()) out.put(size);
    out.put(static_cast<uint64_t>(std::hash<std::string_view>()(bytes_of(tensor))));
  }
  return out.take();
}

bool contains(const std::vector<int>& ranks, int rank) {
  return std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
}

}  // namespace

std::vector<std::string> gather_from_first_replica(std::string_view bytes, Transport& pipeline,
                                                   Transport& replicas) {
  const bool counts = replicas.rank() == 0;
  std::vector<std::string> gathered;
  if (counts) gathered = pipeline.all_gather(bytes);
  if (replicas.size() == 1) return gathered;
  WireWriter out;
  for (const std::string& text : gathered) out.put(text);
  const std::string all = replicas.all_gather(counts ? out.take() : std::string()).front();
  WireReader in(all);
  gathered.clear();
  while (!in.at_end()) gathered.push_back(in.get_string());
  return gathered;
}

StateExchange::StateExchange(std::map<std::string, at::Tensor> own, std::string own_error,
                             Transport& pipeline, Transport& replicas)
    : own_(std::move(own)), pipeline_(pipeline), replicas_(replicas) {
  for (auto& [name, tensor] : own_) tensor = tensor.detach().contiguous();
  const std::vector<std::string> all =
      gather_from_first_replica(encode(own_, own_error), pipeline, replicas);
  for (size_t r = 0; r < all.size(); ++r) read_offers(all[r], static_cast<int>(r));
}

void StateExchange::read_offers(const std::string& bytes, int pipeline_rank) {
  WireReader in(bytes);
  const std::string error = in.get_string();
  if (error_.empty()) error_ = error;
  while (!in.at_end()) {
    const std::string name = in.get_string();
    Offer offer{.dtype = static_cast<c10::ScalarType>(in.get<int8_t>())};
    const auto dims = in.get<uint32_t>();
    for (uint32_t d = 0; d < dims; ++d) offer.sizes.push_back(in.get<int64_t>());
    offer.content = in.get<uint64_t>();
    Offer& known = offers_.try_emplace(name, offer).first->second;
    known.ranks.push_back(pipeline_rank);
    const bool agrees =
        known.dtype == offer.dtype && known.sizes == offer.sizes && known.content == offer.content;
    if (agrees || !error_.empty()) continue;
    error_ = "expected one state on all ranks, got another '" + name + "' on pipeline rank " +
             std::to_string(pipeline_rank) + " than on " + std::to_string(known.ranks.front()) +
             ". Read the same save on every rank.";
  }
}

at::Tensor StateExchange::from_pipeline(const std::string& name, const Offer& offer,
                                        const std::vector<int>& holders) {
  const int me = pipeline_.rank(), source = offer.ranks.front();
  if (me == source) {
    for (const int holder : holders) {
      if (contains(offer.ranks, holder)) continue;
      pipeline_.send_bytes(holder, kStateTag, bytes_of(own_.at(name)));
    }
  }
  if (!contains(holders, me)) return {};
  if (contains(offer.ranks, me)) return own_.at(name);
  const std::string bytes = pipeline_.receive_bytes(source, kStateTag);
  at::Tensor tensor = at::empty(offer.sizes, at::TensorOptions().dtype(offer.dtype));
  TORCH_INTERNAL_ASSERT(bytes.size() == tensor.nbytes(), "'", name,
                        "' came with another size than it was offered with");
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

at::Tensor StateExchange::deliver(const std::string& name, const std::vector<int>& holders) {
  const Offer& offer = offers_.at(name);
  at::Tensor tensor;
  if (replicas_.rank() == 0) tensor = from_pipeline(name, offer, holders);
  if (replicas_.size() == 1 || !contains(holders, pipeline_.rank())) return tensor;
  if (replicas_.rank() > 0) tensor = at::empty(offer.sizes, at::TensorOptions().dtype(offer.dtype));
  replicas_.broadcast(tensor.mutable_data_ptr(), static_cast<int64_t>(tensor.nbytes()), 0);
  return tensor;
}

}  // namespace smp::runtime
