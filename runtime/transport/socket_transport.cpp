// Owns the Transport of one rank that is connected by sockets: the contract in terms of the engine's messages.
#include "runtime/transport/socket_transport.h"

#include <c10/util/Exception.h>

#include <cstring>
#include <map>
#include <numeric>

#include "runtime/transport/abandoned.h"
#include "runtime/transport/checks.h"
#include "runtime/transport/group_transport.h"
#include "runtime/transport/socket_engine.h"

namespace smp::runtime::sockets {
namespace {

// Collectives have a channel of their own beside the callers' messages, and tags by kind.
enum CollectiveTag : int { kBarrierTag, kBroadcastTag, kLengthTag, kGatherTag };

uint64_t mixed(uint64_t hash, uint64_t value) {  // FNV-1a, by words
  return (hash ^ value) * 0x100000001b3;
}

class SocketTransport final : public GroupTransport {
 public:
  SocketTransport(std::shared_ptr<Engine> engine, uint64_t channel, std::vector<int> members, int rank)
      : GroupTransport(std::move(members), rank), engine_(std::move(engine)), channel_(channel) {}

  Engine& engine() { return *engine_; }

  Request isend(int dest, int tag, const DeviceMemory& from) override {
    check_host_memory("isend", from);
    check_message("isend", dest, size(), tag, from.num_bytes);
    return engine_->isend(channel_, world_rank(dest), tag, from.data, from.num_bytes);
  }
  Request irecv(int source, int tag, const DeviceMemory& into) override {
    check_host_memory("irecv", into);
    check_message("irecv", source, size(), tag, into.num_bytes);
    return engine_->irecv(channel_, world_rank(source), tag, into.data, into.num_bytes);
  }
  void progress() override { engine_->progress(); }

  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override;
  void broadcast(const DeviceMemory& bytes, int root) override;
  std::vector<std::string> all_gather(std::string_view bytes) override;
  void barrier() override;

  void set_timeout(std::chrono::milliseconds timeout) override { engine_->watch().set_timeout(timeout); }
  void describe_by(const std::function<std::string()>& doing) override { engine_->watch().describe_by(doing); }
  void do_beside(const std::function<void()>& move) override { engine_->watch().do_beside(move); }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    const auto is_done_now = [&] {
      engine_->progress();
      return is_done();
    };
    engine_->watch().wait_until(is_done_now, where);
  }
  bool abort(std::string_view message) noexcept override { return engine_->watch().abort(message); }
  void end_in_order() noexcept override { engine_->watch().end_in_order(); }

 private:
  uint64_t collectives() const { return ~channel_; }
  Request send(int dest, int tag, const void* data, int64_t num_bytes) {
    return engine_->isend(collectives(), world_rank(dest), tag, data, num_bytes);
  }
  void receive(int source, int tag, void* data, int64_t num_bytes, const std::string& operation);

  std::shared_ptr<Engine> engine_;
  uint64_t channel_;
  std::map<std::vector<int>, uint64_t> num_groups_;  // that were made of these members
};

void SocketTransport::receive(int source, int tag, void* data, int64_t num_bytes, const std::string& operation) {
  const int64_t got = engine_->irecv(collectives(), world_rank(source), tag, data, num_bytes).wait(operation);
  if (got != num_bytes) {
    throw CommError({.operation = operation, .peer = world_rank(source)},
                    "expected " + std::to_string(num_bytes) + " bytes, got " + std::to_string(got));
  }
}

// All members make their groups in the same order, so they count alike without a word.
std::shared_ptr<Transport> SocketTransport::group(const std::vector<int>& ranks) {
  const int my_index = check_group(ranks, rank(), size());
  std::vector<int> members = world_ranks(ranks);
  uint64_t channel = mixed(channel_, ++num_groups_[members]);
  for (const int member : members) channel = mixed(channel, static_cast<uint64_t>(member) + 1);
  const auto made = std::make_shared<SocketTransport>(engine_, channel, std::move(members), my_index);
  made->barrier();  // those that were called with another list are missed here
  return made;
}

void SocketTransport::broadcast(const DeviceMemory& bytes, int root) {
  check_host_memory("broadcast", bytes);
  check_message("broadcast", root, size(), 0, bytes.num_bytes);
  const std::string operation =
      "broadcast of " + std::to_string(bytes.num_bytes) + " bytes from rank " + std::to_string(world_rank(root));
  if (rank() != root) return receive(root, kBroadcastTag, bytes.data, bytes.num_bytes, operation);
  std::vector<Request> sent;
  for (int peer = 0; peer < size(); ++peer)
    if (peer != root) sent.push_back(send(peer, kBroadcastTag, bytes.data, bytes.num_bytes));
  for (Request& request : sent) request.wait(operation);
}

struct GatherBuffers {
  int64_t my_length;
  std::string mine;
  std::vector<int64_t> lengths;  // by rank
  std::vector<std::string> all{};
};

std::vector<std::string> SocketTransport::all_gather(std::string_view bytes) {
  const auto num_ranks = static_cast<size_t>(size());
  const auto own = std::make_shared<GatherBuffers>(GatherBuffers{.my_length = static_cast<int64_t>(bytes.size()),
                                                                 .mine = std::string(bytes),
                                                                 .lengths = std::vector<int64_t>(num_ranks)});
  own->all.resize(num_ranks);
  return keeping(own, [&] {
    std::vector<Request> sent;
    for (int peer = 0; peer < size(); ++peer) {
      sent.push_back(send(peer, kLengthTag, &own->my_length, sizeof own->my_length));
      sent.push_back(send(peer, kGatherTag, own->mine.data(), own->my_length));
    }
    for (size_t peer = 0; peer < num_ranks; ++peer) {
      receive(static_cast<int>(peer), kLengthTag, &own->lengths[peer], sizeof own->lengths[peer], "all_gather of lengths");
      own->all[peer].resize(static_cast<size_t>(own->lengths[peer]));
      receive(static_cast<int>(peer), kGatherTag, own->all[peer].data(), own->lengths[peer], "all_gather");
    }
    for (Request& request : sent) request.wait("all_gather");
    return own->all;
  });
}

// After round k each rank has heard, itself or through others, of 2^k ranks before it.
void SocketTransport::barrier() {
  for (int distance = 1; distance < size(); distance *= 2) {
    Request sent = send((rank() + distance) % size(), kBarrierTag, nullptr, 0);
    receive((rank() + size() - distance) % size(), kBarrierTag, nullptr, 0, "barrier");
    sent.wait("barrier");
  }
}

}  // namespace

std::shared_ptr<Transport> create(c10d::Store& store, const Newcomer& self, std::chrono::milliseconds timeout) {
  auto engine = std::make_shared<Engine>(meet(store, self, timeout), timeout);
  std::vector<int> members(static_cast<size_t>(self.size));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<SocketTransport>(engine, /*channel=*/1, std::move(members), self.rank);
}

void shutdown(Transport& world) {
  auto& mine = dynamic_cast<SocketTransport&>(world);
  if (mine.engine().watch().has_failed()) return;
  mine.barrier();
  mine.engine().leave();
}

}  // namespace smp::runtime::sockets
