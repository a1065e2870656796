// Owns the Transport of one loopback rank: the contract in terms of LoopbackHub.
#include "runtime/transport/loopback.h"

#include <c10/util/Exception.h>

#include <numeric>

#include "runtime/transport/backoff.h"
#include "runtime/transport/checks.h"
#include "runtime/transport/group_transport.h"
#include "runtime/transport/loopback_hub.h"

namespace smp::runtime {
namespace {

// What all groups of one rank share.
class RankEnd final : public RequestPool {
 public:
  RankEnd(std::shared_ptr<LoopbackHub> the_hub, int the_rank, std::chrono::milliseconds the_timeout)
      : hub(std::move(the_hub)), world_rank(the_rank), timeout(the_timeout) {}

  bool test(uint32_t slot, int64_t* num_bytes) override { return hub->test(world_rank, slot, num_bytes); }
  int64_t wait(uint32_t slot, std::string_view action) override { return hub->wait(world_rank, slot, action, timeout); }
  void drop(uint32_t slot) noexcept override { hub->drop(world_rank, slot); }

  const std::shared_ptr<LoopbackHub> hub;
  const int world_rank;
  std::chrono::milliseconds timeout;
};

class LoopbackTransport final : public GroupTransport {
 public:
  LoopbackTransport(std::shared_ptr<RankEnd> end, uint32_t group_id, std::vector<int> members, int rank)
      : GroupTransport(std::move(members), rank), end_(std::move(end)), group_id_(group_id) {}

  Request isend(int dest, int tag, const DeviceMemory& from) override {
    check_ranks_memory("isend", from);
    check_message("isend", dest, size(), tag, from.num_bytes);
    return post(LoopbackMessage::Kind::kSend, dest, tag, from);
  }
  Request irecv(int source, int tag, const DeviceMemory& into) override {
    check_ranks_memory("irecv", into);
    check_message("irecv", source, size(), tag, into.num_bytes);
    return post(LoopbackMessage::Kind::kReceive, source, tag, into);
  }
  bool moves_memory_of(c10::DeviceType /*device*/) const override { return true; }
  void progress() override { hub().throw_if_failed(); }

  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override {
    const int new_rank = check_group(ranks, rank(), size());
    std::vector<int> members = world_ranks(ranks);
    const uint32_t id = hub().group_id(end_->world_rank, group_id_, members);
    auto made = std::make_shared<LoopbackTransport>(end_, id, std::move(members), new_rank);
    made->meet("group", nullptr, [](const auto&) {});
    return made;
  }

  void broadcast(const DeviceMemory& bytes, int root) override {
    check_ranks_memory("broadcast", bytes);
    check_message("broadcast", root, size(), 0, bytes.num_bytes);
    const std::string name =
        "broadcast of " + std::to_string(bytes.num_bytes) + " bytes from rank " + std::to_string(world_rank(root));
    const Device& device = device_of(bytes);
    struct Contribution {
      void* data;
      Event at;  // what comes before the copies; then the end of them
    } mine{bytes.data, device.record()};
    meet(name, &mine, [&](const std::vector<void*>& contributions) {
      const auto of = [&](size_t rank) { return static_cast<Contribution*>(contributions[rank]); };
      for (size_t rank = 0; rank < contributions.size(); ++rank) device.go_on_behind(of(rank)->at);
      const void* const from = of(static_cast<size_t>(root))->data;
      for (size_t rank = 0; rank < contributions.size(); ++rank) {
        if (of(rank)->data != from) device.copy(of(rank)->data, from, bytes.num_bytes);
      }
      const Event end = device.record();
      for (size_t rank = 0; rank < contributions.size(); ++rank) of(rank)->at = end;
    });
    device.go_on_behind(mine.at);
  }

  std::vector<std::string> all_gather(std::string_view bytes) override {
    struct Contribution {
      std::string_view bytes;
      std::vector<std::string> gathered;
    } mine{bytes, {}};
    meet("all_gather", &mine, [](const std::vector<void*>& contributions) {
      for (void* to : contributions)
        for (const void* from : contributions)
          static_cast<Contribution*>(to)->gathered.emplace_back(static_cast<const Contribution*>(from)->bytes);
    });
    return std::move(mine.gathered);
  }

  void barrier() override {
    meet("barrier", nullptr, [](const auto&) {});
  }

  void set_timeout(std::chrono::milliseconds timeout) override { end_->timeout = timeout; }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    for (Backoff backoff(/*has_own_core=*/false); !is_done(); backoff.pause()) {
      progress();
      if (backoff.elapsed() < end_->timeout) continue;
      throw HangError(where(std::chrono::duration<double>(backoff.elapsed()).count()).text() + ": timed out", {});
    }
  }
  bool abort(std::string_view message) noexcept override { return hub().abort(end_->world_rank, message); }
  void end_in_order() noexcept override {}  // the ranks are one process

 private:
  LoopbackHub& hub() const { return *end_->hub; }

  Request post(LoopbackMessage::Kind kind, int peer, int tag, const DeviceMemory& memory) {
    return {*end_,
            hub().post(end_->world_rank, {kind, world_rank(peer), tag, group_id_, memory, device_of(memory).record()})};
  }
  void meet(std::string name, void* contribution, const LoopbackHub::Combine& combine) {
    Request(*end_, hub().meet(end_->world_rank, group_id_, members(), std::move(name), contribution, combine)).wait();
  }

  std::shared_ptr<RankEnd> end_;
  uint32_t group_id_;
};

}  // namespace

LoopbackWorld::LoopbackWorld(int size, std::chrono::milliseconds timeout) : size_(size), timeout_(timeout) {
  TORCH_CHECK_VALUE(size >= 1, "LoopbackWorld: expected at least 1 rank, got ", size, ".");
  hub_ = std::make_shared<LoopbackHub>(size);
}

LoopbackWorld::~LoopbackWorld() = default;

std::shared_ptr<Transport> LoopbackWorld::transport(int rank) const {
  TORCH_CHECK_INDEX(rank >= 0 && rank < size_, "LoopbackWorld: expected a rank of 0 ... ", size_ - 1, ", got ", rank, ".");
  std::vector<int> members(static_cast<size_t>(size_));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<LoopbackTransport>(std::make_shared<RankEnd>(hub_, rank, timeout_), 0, std::move(members), rank);
}

void LoopbackWorld::leave(int rank) { hub_->leave(rank); }

void LoopbackWorld::close() { hub_->close(); }

}  // namespace smp::runtime
