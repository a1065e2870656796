// What the operators of a recording may do to memory. The stages run all operators of a body before its backwards, and on
// other ranks: what a plain loop would see in between must not depend on that.
#pragma once

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "runtime/capture/recording.h"

namespace smp::runtime {

class MemoryRules {
 public:
  explicit MemoryRules(const Recording& recording) : recording_(recording) {}

  /// Throws where the next operator reads what empty() has made and nothing has written.
  void check_reads(const OperatorInfo& info, const partitioner::Node& node) const;
  /// Throws where `value` would tell a copy, which is what the stages make, from data that were replaced. `user` is for the
  /// text.
  void check_replaced(const std::string& user, partitioner::ValueId value, bool is_written) const;
  /// Fills node.written_storages of the next operator. Throws for a constant, and for what a backward before it needs.
  void check_writes(const OperatorInfo& info, partitioner::Node& node) const;
  /// Another backward starts at `root`, after the first `position` operators. Throws where running statistics that it needs
  /// have been written to since.
  void check_backward(partitioner::ValueId root, partitioner::NodeId position) const;

  /// The operator, results and written storages included, is part of the recording.
  void add(const OperatorInfo& info, const partitioner::Node& node);
  void add_backward(partitioner::NodeId position) { backward_positions_.push_back(position); }

  bool is_written(int32_t storage) const { return written_.contains(storage); }

 private:
  bool is_of_model(partitioner::ValueId id) const;
  void check_write(const OperatorInfo& info, partitioner::ValueId id) const;
  void check_replacement(const partitioner::Node& node) const;
  void check_saved_before_replacement(partitioner::ValueId root, partitioner::NodeId position) const;
  void check_backwards_before(const OperatorInfo& info, partitioner::ValueId id) const;
  std::unordered_set<int32_t> hidden_writes(partitioner::NodeId n) const;
  bool may_have_saved(partitioner::ValueId root, partitioner::NodeId position, int32_t storage) const;
  void for_saved(partitioner::ValueId root, partitioner::NodeId position,
                 const std::function<void(partitioner::NodeId, partitioner::ValueId)>& use) const;

  /// Data of a parameter or buffer that the body has replaced by what a result of its holds.
  struct Replacement {
    partitioner::ValueId first;     // of the values that are this tensor
    partitioner::ValueId replaced;  // what it is since
    int32_t target, source;         // storages
    partitioner::NodeId node;
    bool is_written = false;  // since, by an operator
  };

  const Recording& recording_;
  std::unordered_set<int32_t> written_, uninitialised_;  // storages
  std::vector<Replacement> replacements_;
  std::vector<partitioner::NodeId> backward_positions_;  // by backward root: how many operators came before
};

}  // namespace smp::runtime
