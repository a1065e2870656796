// Names of calls, told and heard.
#include "runtime/exchange/calls.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>

#include "runtime/exchange/root_cause.h"
#include "runtime/exchange/tags.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {

namespace {

/// Names are cut to what there is room for.
class Name {
 public:
  static constexpr int64_t kMostBytes = 120;

  void set(std::string_view text) {
    num_bytes_ = std::min(static_cast<int64_t>(text.size()), kMostBytes);
    std::copy_n(text.begin(), num_bytes_, chars_.begin());
  }
  void set_length(int64_t num_bytes) { num_bytes_ = num_bytes; }
  char* data() { return chars_.data(); }
  int64_t num_bytes() const { return num_bytes_; }
  std::string_view text() const { return {chars_.data(), static_cast<size_t>(num_bytes_)}; }

 private:
  std::array<char, kMostBytes> chars_{};
  int64_t num_bytes_ = 0;
};

}  // namespace

struct Calls::Peer {
  Name told, heard;
  Request sent, received;
  uint64_t num_told = 0, num_heard = 0;  // the second is the same, or one less
};

Calls::Calls(std::shared_ptr<Transport> world)
    : world_(std::move(world)), peers_(std::make_shared<std::vector<Peer>>(static_cast<size_t>(world_->size()))) {}

// Names may be under way still, of a job that fails or to a rank that has not heard the last one.
Calls::~Calls() {
  for (Peer& peer : *peers_) peer.sent = {}, peer.received = {};
  if (world_->size() > 1) abandon(peers_);
}

void Calls::tell(int partner, std::string_view name) {
  hear(partner, name);
  Peer& peer = (*peers_)[static_cast<size_t>(partner)];
  peer.sent.wait(name);
  peer.told.set(name);
  ++peer.num_told;
  peer.received = world_->irecv(partner, kCallTag, peer.heard.data(), Name::kMostBytes);
  peer.sent = world_->isend(partner, kCallTag, peer.told.data(), peer.told.num_bytes());
}

void Calls::hear(int partner, std::string_view action) {
  Peer& peer = (*peers_)[static_cast<size_t>(partner)];
  if (peer.num_heard == peer.num_told) return;
  peer.heard.set_length(peer.received.wait(action));
  ++peer.num_heard;
  if (peer.heard.text() == peer.told.text()) return;
  or_end_the_job(*world_, [&] {
    with_exit_code(ExitCode::kDesync, [&] {
      TORCH_CHECK(false, "expected every rank to make the same calls in the same order, got ", peer.told.text(), " on rank ",
                  world_->rank(), " and ", peer.heard.text(), " on rank ", partner, " (call ", peer.num_heard,
                  " of the two together). Make each call on all the ranks that it concerns, outside of conditions that hold "
                  "on some of them only.");
    });
  });
}

}  // namespace smp::runtime
