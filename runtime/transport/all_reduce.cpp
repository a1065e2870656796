// Owns the two hops of the sum over ranks.
#include "runtime/transport/all_reduce.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "runtime/transport/sum.h"

namespace smp::runtime {
namespace {

// Below, one hop with all of the data is faster than two with parts of it.
constexpr int64_t kMaxBytesInOneHop = 4096;
// What a rank sums at a time: its part and what the others sent for it should stay in the cache.
constexpr int64_t kMaxPartBytes = 256 << 10;

// The elements [first, first + num_elements) of the data.
struct Range {
  char* data;
  int64_t num_elements;
  int64_t element_bytes;
  int64_t num_bytes() const { return num_elements * element_bytes; }
};

class RankOrderSum {
 public:
  RankOrderSum(const Messenger& messenger, c10::ScalarType type, const std::string& action)
      : messenger_(messenger), type_(type), action_(action) {}

  void in_one_hop(const Range& range) {
    receive_from_all(range);
    send_to_all([&](int) { return range; });
    wait_for_all();
    sum_into(range);
  }

  void in_two_hops(const Range& range) {
    const Range mine = part(range, messenger_.rank);
    receive_from_all(mine);
    send_to_all([&](int dest) { return part(range, dest); });
    wait_for_all();
    sum_into(mine);
    for_others([&](int source) {
      const Range theirs = part(range, source);
      requests_.push_back(messenger_.irecv(source, theirs.data, theirs.num_bytes()));
    });
    send_to_all([&](int) { return mine; });
    wait_for_all();
  }

 private:
  template <class Fn>
  void for_others(const Fn& fn) {
    for (int step = 1; step < messenger_.size; ++step)
      fn((messenger_.rank + step) % messenger_.size);  // not all to rank 0 first
  }

  Range part(const Range& range, int rank) const {
    const int64_t first = range.num_elements * rank / messenger_.size;
    const int64_t end = range.num_elements * (rank + 1) / messenger_.size;
    return {range.data + first * range.element_bytes, end - first, range.element_bytes};
  }

  // Their elements of `range`, into received_ by rank.
  void receive_from_all(const Range& range) {
    received_.resize(static_cast<size_t>(range.num_bytes() * messenger_.size));
    for_others(
        [&](int source) { requests_.push_back(messenger_.irecv(source, received_from(source, range), range.num_bytes())); });
  }
  char* received_from(int rank, const Range& range) { return received_.data() + rank * range.num_bytes(); }

  template <class RangeFor>
  void send_to_all(const RangeFor& range_for) {
    for_others([&](int dest) {
      const Range range = range_for(dest);
      requests_.push_back(messenger_.isend(dest, range.data, range.num_bytes()));
    });
  }

  void wait_for_all() {
    for (Request& request : requests_) request.wait(action_);
    requests_.clear();
  }

  void sum_into(const Range& range) {
    std::vector<const void*> terms;
    for (int rank = 0; rank < messenger_.size; ++rank)
      terms.push_back(rank == messenger_.rank ? range.data : received_from(rank, range));
    sum_in_order(terms, range.data, range.num_elements, type_);
  }

  const Messenger& messenger_;
  c10::ScalarType type_;
  const std::string& action_;
  std::vector<char> received_;
  std::vector<Request> requests_;
};

}  // namespace

void all_reduce_in_rank_order(const Messenger& messenger, void* data, int64_t num_elements, c10::ScalarType type,
                              const std::string& action) {
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(type));
  const Range all{static_cast<char*>(data), num_elements, element_bytes};
  RankOrderSum sum(messenger, type, action);
  if (all.num_bytes() <= kMaxBytesInOneHop) return sum.in_one_hop(all);
  const int64_t step = kMaxPartBytes / element_bytes * messenger.size;
  for (int64_t first = 0; first < num_elements; first += step)
    sum.in_two_hops({all.data + first * element_bytes, std::min(step, num_elements - first), element_bytes});
}

}  // namespace smp::runtime
