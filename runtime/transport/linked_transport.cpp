// The contract in terms of LinkEnd and of the inner transport.
#include "runtime/transport/linked_transport.h"

#include <numeric>
#include <utility>

#include "runtime/transport/checks.h"
#include "runtime/transport/group_transport.h"
#include "runtime/transport/link_end.h"

namespace smp::runtime {
namespace {

class LinkedTransport final : public GroupTransport {
 public:
  LinkedTransport(std::shared_ptr<Transport> inner, std::shared_ptr<LinkEnd> end, std::vector<int> members)
      : GroupTransport(std::move(members), inner->rank()), end_(std::move(end)), inner_(std::move(inner)) {}

  Request isend(int dest, int tag, const DeviceMemory& from) override {
    check_ranks_memory("isend", from);
    check_message("isend", dest, size(), tag, from.num_bytes);
    if (!end_->is_linked(from)) return inner_->isend(dest, tag, from);
    return end_->isend(*inner_, dest, world_rank(dest), tag, from);
  }
  Request irecv(int source, int tag, const DeviceMemory& into) override {
    check_ranks_memory("irecv", into);
    check_message("irecv", source, size(), tag, into.num_bytes);
    if (!end_->is_linked(into)) return inner_->irecv(source, tag, into);
    return end_->irecv(*inner_, source, world_rank(source), tag, into);
  }
  bool moves_memory_of(c10::DeviceType /*device*/) const override { return true; }
  void progress() override {
    end_->move();
    inner_->progress();
  }

  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override {
    auto inner = inner_->group(ranks);  // which checks them
    return std::make_shared<LinkedTransport>(std::move(inner), end_, world_ranks(ranks));
  }
  void end_group() override { inner_->end_group(); }
  void settle() override { end_->settle(); }

  void all_reduce_sum(const DeviceMemory& terms, c10::ScalarType type) override {
    if (terms.device != host().type) return Transport::all_reduce_sum(terms, type);
    inner_->all_reduce_sum(terms, type);
  }
  void broadcast(const DeviceMemory& bytes, int root) override {
    check_ranks_memory("broadcast", bytes);
    check_message("broadcast", root, size(), 0, bytes.num_bytes);
    if (!end_->is_linked(bytes)) return inner_->broadcast(bytes, root);
    const std::string action = "broadcast from rank " + std::to_string(world_rank(root));
    std::vector<Request> messages;
    for (int other = 0; other < size(); ++other) {
      if (rank() == root && other != root) messages.push_back(isend(other, kSumTag, bytes));
    }
    if (rank() != root) messages.push_back(irecv(root, kSumTag, bytes));
    for (Request& message : messages) {
      if (const int64_t num_bytes = message.wait(action); num_bytes != bytes.num_bytes)
        throw CommError({.operation = action},
                        "expected " + std::to_string(bytes.num_bytes) + " bytes, got " + std::to_string(num_bytes));
    }
  }
  std::vector<std::string> all_gather(std::string_view bytes) override { return inner_->all_gather(bytes); }
  void barrier() override { inner_->barrier(); }

  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  void describe_by(const std::function<std::string()>& doing) override { inner_->describe_by(doing); }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    inner_->wait_until(is_done, where);
  }
  bool abort(std::string_view message) noexcept override { return inner_->abort(message); }
  void end_in_order() noexcept override { inner_->end_in_order(); }

 private:
  std::shared_ptr<LinkEnd> end_;
  std::shared_ptr<Transport> inner_;
};

}  // namespace

std::shared_ptr<Transport> make_linked(std::shared_ptr<Transport> world, const DeviceLinks& links, Linked linked) {
  std::vector<int> all(static_cast<size_t>(world->size()));
  std::iota(all.begin(), all.end(), 0);
  auto end = std::make_shared<LinkEnd>(world, links, linked == Linked::kAllMemory);
  return std::make_shared<LinkedTransport>(std::move(world), std::move(end), std::move(all));
}

}  // namespace smp::runtime
