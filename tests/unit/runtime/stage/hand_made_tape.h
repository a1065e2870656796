// Lists of a tape made by hand, call by call.
#pragma once

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "runtime/stage/tape_lists.h"

namespace smp::runtime::stage_graphs {

/// Of one tensor of four numbers on its own memory per slot, unless said otherwise.
class HandMadeTape : public ::testing::Test {
 protected:
  int32_t slot(const at::Tensor& like = at::ones({4})) {
    lists_.slot_geometries.push_back(geometry_of(like));
    lists_.slot_memories.push_back(static_cast<int32_t>(lists_.num_slots));
    fixed_.emplace_back();
    return static_cast<int32_t>(lists_.num_slots++);
  }
  TapeCall& call(const char* name, const char* overload, const std::vector<int32_t>& read,
                 const std::vector<int32_t>& made) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    TapeCall& added = lists_.calls.emplace_back(TapeCall{{.op = op}});
    for (const int32_t slot : read) {
      added.tensors.push_back({static_cast<uint32_t>(added.arguments.size()), slot});
      added.arguments.emplace_back();
    }
    added.outputs = made;
    return added;
  }
  TapeCall& view(int32_t base, int32_t made) {
    TapeCall& added = call("aten::as_strided", "", {base}, {made});
    added.kind = TapeCall::Kind::kView;
    added.geometry = lists_.slot_geometries[static_cast<size_t>(made)];
    return added;
  }
  TapeCall& gradient(int32_t slot) {
    TapeCall& added = call("aten::add_", "Tensor", {slot}, {});
    added.kind = TapeCall::Kind::kGradient;
    return added;
  }
  /// "view", "gradient", or the operator without "aten::".
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const TapeCall& call : lists_.calls) {
      const char* kinds[] = {"", "view", "gradient"};
      const bool is_operator = call.kind == TapeCall::Kind::kOperator;
      all.push_back(is_operator ? call.op.operator_name().name.substr(6) : kinds[static_cast<size_t>(call.kind)]);
    }
    return all;
  }

  TapeLists lists_;
  Slots fixed_;
};

}  // namespace smp::runtime::stage_graphs
