// Where tensors live. Knows no tensors and moves none.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace smp::partitioner {

/// What each rank of a home has of its tensor: part `index` of `count`.
struct Shard {
  int32_t index = 0;
  int32_t count = 1;
  bool is_whole() const { return count == 1; }
  bool operator==(const Shard&) const = default;
};

/// Placement, exchange of state, save files and planning all say so where a tensor lives.
class TensorHome {
 public:
  TensorHome() = default;
  /// ranks: pipeline ranks that hold it, ascending, the first of them its owner.
  TensorHome(std::vector<int> ranks, Shard shard = {}) : ranks_(std::move(ranks)), shard_(shard) {}

  static TensorHome on_all(int num_ranks) {
    std::vector<int> ranks(static_cast<size_t>(num_ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }

  /// The ranks, each of which has all of the tensor. Throws c10::NotImplementedError where they have parts: who reads a part
  /// as the tensor would go on with wrong numbers.
  const std::vector<int>& whole_on() const {
    TORCH_CHECK_NOT_IMPLEMENTED(shard_.is_whole(),
                                "home of a tensor: expected the whole tensor on each of its ranks, got part ", shard_.index,
                                " of ", shard_.count, ". This version of smp does not cut tensors.");
    return ranks_;
  }
  int owner() const { return whole_on().front(); }
  bool is_on(int rank) const { return std::find(whole_on().begin(), whole_on().end(), rank) != ranks_.end(); }
  bool is_tied() const { return whole_on().size() > 1; }

  bool operator==(const TensorHome&) const = default;

 private:
  std::vector<int> ranks_;
  Shard shard_;
};

/// By name of a parameter or buffer: the first, of several.
using TensorHomes = std::map<std::string, TensorHome>;

}  // namespace smp::partitioner
