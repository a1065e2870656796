// One queue of sends for all groups of a rank: whoever waits in one of them must not keep back what another rank waits for.
#include "runtime/transport/staged_transport.h"

#include <c10/core/Allocator.h>

#include <deque>
#include <exception>
#include <utility>

#include "runtime/device/device.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/checks.h"

namespace smp::runtime {
namespace {

class StagingEnd final : public RequestPool {
 public:
  explicit StagingEnd(Staged staged) : staged_(staged) {}
  // What messages under way are written to and read from stays.
  ~StagingEnd() {
    for (Slot& slot : slots_) {
      slot.request = {};
      slot.inner.reset();
      if (slot.staged) abandon(std::make_shared<c10::DataPtr>(std::move(slot.staged)));
    }
    for (auto& [reached, memory] : copying_) abandon(std::make_shared<c10::DataPtr>(std::move(memory)));
  }
  StagingEnd(const StagingEnd&) = delete;
  StagingEnd& operator=(const StagingEnd&) = delete;

  bool is_staged(const DeviceMemory& memory) const { return staged_ == Staged::kAllMemory || memory.device != host().type; }

  Request isend(std::shared_ptr<Transport> inner, int dest, int tag, const DeviceMemory& from) {
    Slot& slot = take(std::move(inner), dest, tag, from);
    if (slot.is_staged) {
      slot.device->start_copy(slot.staged.get(), from.data, from.num_bytes);
      slot.ready = slot.device->record();
    }
    waiting_.push_back(slot.number);
    send(/*all=*/false);
    return {*this, slot.number};
  }

  Request irecv(std::shared_ptr<Transport> inner, int source, int tag, const DeviceMemory& into) {
    Slot& slot = take(std::move(inner), source, tag, into);
    slot.is_receive = true;
    slot.request = slot.inner->irecv(source, tag, slot.on_host());
    slot.is_posted = true;
    return {*this, slot.number};
  }

  /// Hands over what the device has made; or all, once it is made.
  void send(bool all) {
    while (!copying_.empty() && this_ranks_device().has_reached(copying_.front().first)) copying_.pop_front();
    std::erase_if(dropped_, [this](uint32_t number) { return free_if_done(slots_[number]); });
    for (; !waiting_.empty(); waiting_.pop_front()) {
      Slot& slot = slots_[waiting_.front()];
      if (slot.ready && !slot.device->has_reached(slot.ready)) {
        if (!all) return;
        slot.device->wait(slot.ready);
      }
      slot.request = slot.inner->isend(slot.peer, slot.tag, slot.on_host());
      slot.is_posted = true;
    }
  }

  void settle() {
    for (; !copying_.empty(); copying_.pop_front()) this_ranks_device().wait(copying_.front().first);
  }

  bool test(uint32_t number, int64_t* num_bytes) override {
    send(/*all=*/false);
    Slot& slot = slots_[number];
    if (!slot.is_posted) {
      slot.inner->progress();
      return false;
    }
    if (!slot.request.test()) return false;
    *num_bytes = finish(slot, {});
    return true;
  }

  int64_t wait(uint32_t number, std::string_view action) override {
    send(/*all=*/true);
    return finish(slots_[number], action);
  }

  // The message goes on, and so does its memory.
  void drop(uint32_t number) noexcept override { dropped_.push_back(number); }

 private:
  struct Slot {
    uint32_t number = 0;
    std::shared_ptr<Transport> inner;
    int peer = 0, tag = 0;
    DeviceMemory memory{};
    const Device* device = nullptr;
    bool is_staged = false, is_receive = false, is_posted = false;
    c10::DataPtr staged;
    Event ready;
    Request request;

    DeviceMemory on_host() const { return is_staged ? DeviceMemory{staged.get(), memory.num_bytes} : memory; }
  };

  Slot& take(std::shared_ptr<Transport> inner, int peer, int tag, const DeviceMemory& memory) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    Slot& slot = slots_[free_.back()];
    slot = Slot();
    slot.number = free_.back();
    slot.inner = std::move(inner);
    slot.peer = peer, slot.tag = tag;
    slot.memory = memory;
    slot.device = &device_of(memory);
    slot.is_staged = is_staged(memory);
    if (slot.is_staged) slot.staged = slot.device->allocate_pinned(memory.num_bytes);
    free_.pop_back();
    return slot;
  }

  // Of a message that nobody asks for. One that has failed has been told of, or will be by whoever waits; its memory stays.
  bool free_if_done(Slot& slot) {
    try {
      if (!slot.is_posted || !slot.request.test()) return false;
    } catch (const std::exception&) {
      return true;
    }
    clear(slot);
    return true;
  }

  int64_t finish(Slot& slot, std::string_view action) {
    const int64_t num_bytes = slot.request.wait(action);
    if (slot.is_staged && slot.is_receive) {
      slot.device->start_copy(slot.memory.data, slot.staged.get(), num_bytes);
      copying_.emplace_back(slot.device->record(), std::move(slot.staged));
    }
    clear(slot);
    return num_bytes;
  }

  void clear(Slot& slot) {
    slot.inner.reset();
    slot.staged.clear();
    slot.ready.reset();
    free_.push_back(slot.number);
  }

  const Staged staged_;
  std::deque<Slot> slots_;
  std::vector<uint32_t> free_, dropped_;
  std::deque<uint32_t> waiting_;                        // sends that the inner transport has not got yet, in order
  std::deque<std::pair<Event, c10::DataPtr>> copying_;  // received, on their way to the device
};

class StagedTransport final : public Transport {
 public:
  StagedTransport(std::shared_ptr<Transport> inner, std::shared_ptr<StagingEnd> end)
      : inner_(std::move(inner)), end_(std::move(end)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }

  Request isend(int dest, int tag, const DeviceMemory& from) override {
    check_ranks_memory("isend", from);
    check_message("isend", dest, size(), tag, from.num_bytes);
    return end_->isend(inner_, dest, tag, from);
  }
  Request irecv(int source, int tag, const DeviceMemory& into) override {
    check_ranks_memory("irecv", into);
    check_message("irecv", source, size(), tag, into.num_bytes);
    return end_->irecv(inner_, source, tag, into);
  }
  bool moves_memory_of(c10::DeviceType /*device*/) const override { return true; }
  void progress() override {
    end_->send(/*all=*/false);
    inner_->progress();
  }

  std::shared_ptr<Transport> group(const std::vector<int>& ranks) override {
    end_->send(/*all=*/true);
    return std::make_shared<StagedTransport>(inner_->group(ranks), end_);
  }
  void settle() override {
    end_->settle();
    inner_->settle();
  }
  void end_group() override { inner_->end_group(); }

  void all_reduce_sum(const DeviceMemory& terms, c10::ScalarType type) override {
    if (terms.device != host().type) return Transport::all_reduce_sum(terms, type);
    end_->send(/*all=*/true);
    inner_->all_reduce_sum(terms, type);
  }
  void broadcast(const DeviceMemory& bytes, int root) override {
    check_ranks_memory("broadcast", bytes);
    check_message("broadcast", root, size(), 0, bytes.num_bytes);
    end_->send(/*all=*/true);
    if (!end_->is_staged(bytes)) return inner_->broadcast(bytes, root);
    const Device& device = device_of(bytes);
    const auto staged = std::make_shared<c10::DataPtr>(host().allocate(bytes.num_bytes));
    if (rank() == root) device.copy(staged->get(), bytes.data, bytes.num_bytes);
    keeping(staged, [&] { inner_->broadcast({staged->get(), bytes.num_bytes}, root); });
    if (rank() != root) device.copy(bytes.data, staged->get(), bytes.num_bytes);
  }
  std::vector<std::string> all_gather(std::string_view bytes) override {
    end_->send(/*all=*/true);
    return inner_->all_gather(bytes);
  }
  void barrier() override {
    end_->send(/*all=*/true);
    inner_->barrier();
  }

  void set_timeout(std::chrono::milliseconds timeout) override { inner_->set_timeout(timeout); }
  void describe_by(const std::function<std::string()>& doing) override { inner_->describe_by(doing); }
  void do_beside(const std::function<void()>& move) override { inner_->do_beside(move); }
  void wait_until(const std::function<bool()>& is_done, const std::function<CommError::Where(double)>& where) override {
    end_->send(/*all=*/true);
    inner_->wait_until(is_done, where);
  }
  bool abort(std::string_view message) noexcept override { return inner_->abort(message); }
  void end_in_order() noexcept override { inner_->end_in_order(); }

 private:
  std::shared_ptr<Transport> inner_;
  std::shared_ptr<StagingEnd> end_;
};

}  // namespace

std::shared_ptr<Transport> make_staged(std::shared_ptr<Transport> inner, Staged staged) {
  return std::make_shared<StagedTransport>(std::move(inner), std::make_shared<StagingEnd>(staged));
}

}  // namespace smp::runtime
