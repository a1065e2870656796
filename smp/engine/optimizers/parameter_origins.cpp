// A number that left LibTorch leaves no trail: whoever reads values of one parameter and updates another before that one is
// taken for mixing them.
#include "smp/engine/optimizers/parameter_origins.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "partitioner/graph/operator_traits.h"
#include "runtime/capture/operator_info.h"
#include "runtime/libtorch/boxed_tensors.h"

namespace smp::engine {
namespace {

using partitioner::Trait;
using runtime::OperatorClass;
using runtime::OperatorInfo;

/// What an operator does with the values it is given.
struct Conduct {
  explicit Conduct(const OperatorInfo& info) {
    const std::string_view name = std::string_view(info.name).substr(info.name.find("::") + 2);
    goes_by_element = name.starts_with("_foreach_") || name.starts_with("_fused_");
    constexpr std::array kOverwriting{"copy_", "_foreach_copy_", "_foreach_zero_"};
    overwrites_first = partitioner::has(Trait::kOverwritesSelf, info.name) ||
                       std::find(kOverwriting.begin(), kOverwriting.end(), name) != kOverwriting.end();
    takes_shape_only = name.ends_with("_like") || name.starts_with("new_") || info.makes_uninitialised ||
                       info.kind == OperatorClass::kGeometryQuery;
    takes_first_only = name.ends_with("_as") || name.ends_with("_as_") || name == "to";
    // Between processes: what ranks have put together is no longer what one of them has.
    is_collective = info.name.starts_with("c10d::") || info.name.starts_with("_c10d_functional::");
  }
  bool goes_by_element, overwrites_first, takes_shape_only, takes_first_only, is_collective;
};

void for_each_dense(const at::Tensor& tensor, const auto& visit) {
  if (tensor.layout() == at::kSparse) {
    visit(tensor._indices()), visit(tensor._values());
  } else if (tensor.has_storage() && tensor.storage()) {
    visit(tensor);
  }
}

std::pair<int64_t, int64_t> bytes_of(const at::Tensor& dense) {
  const auto item = static_cast<int64_t>(dense.itemsize());
  int64_t elements = 1;
  for (int64_t d = 0; d < dense.dim(); ++d) elements += (dense.size(d) - 1) * dense.stride(d);
  const int64_t begin = dense.storage_offset() * item;
  return {begin, begin + (dense.numel() == 0 ? 0 : elements * item)};
}

bool overlaps(const auto& piece, int64_t begin, int64_t end) { return piece.begin < end && begin < piece.end; }

at::Tensor all_bytes(const c10::Storage& storage) {
  const auto size = static_cast<int64_t>(storage.nbytes());
  return at::empty({0}, at::TensorOptions(storage.device()).dtype(at::kByte)).set_(storage, 0, {size}, {1});
}

}  // namespace

void Origin::add(const Origin& more, const std::string& op) {
  if (more.is_mixed() && !is_mixed()) operator_name = more.operator_name;
  for (const int parameter : {more.one, more.other}) {
    if (parameter == kNone || parameter == one || is_mixed()) continue;
    (exists() ? other : one) = parameter;
    if (is_mixed() && operator_name == nullptr) operator_name = &op;
  }
}

/// What is to be known of a call before it runs: the origins of its results, one for each element of the lists that it goes
/// through, and what it writes to.
struct ParameterOrigins::Call {
  const OperatorInfo& info;
  Conduct conduct{info};
  std::vector<Origin> origins{};
  std::vector<std::pair<int, at::Tensor>> written{};  // with the place in a list

  const Origin& origin(int element) const {
    const bool is_one_of = element >= 0 && static_cast<size_t>(element) < origins.size() && conduct.goes_by_element;
    return origins[is_one_of ? static_cast<size_t>(element) : 0];
  }
  void add(int element, const Origin& origin) {
    if (conduct.goes_by_element && element >= 0 && static_cast<size_t>(element) < origins.size()) {
      origins[static_cast<size_t>(element)].add(origin, info.name);
    } else {
      for (Origin& each : origins) each.add(origin, info.name);
    }
  }
};

void ParameterOrigins::begin(const std::vector<Followed>& parameters) {
  finding_.clear(), read_.clear(), parameters_.clear();
  std::erase_if(memories_, [](const auto& entry) { return entry.second.storage.expired(); });
  for (auto& [storage, memory] : memories_) memory.is_of_this_update = false, memory.parameters.clear();
  for (const auto& [tensor, name, state] : parameters) {
    const Origin own{.one = static_cast<int>(parameters_.size())};
    parameters_.push_back({tensor, tensor.detach(), tensor.grad(), name});
    for_each_dense(tensor, [&](const at::Tensor& dense) {
      const auto [from, to] = bytes_of(dense);
      memory_of(dense).parameters.push_back({from, to, own});
    });
    assign(tensor, own);
    if (tensor.grad().defined()) assign(tensor.grad(), own);
    for (const at::Tensor& each : state) {
      for_each_dense(each, [&](const at::Tensor& dense) {
        if (!memories_.contains(dense.storage().unsafeGetStorageImpl())) assign(dense, own);
      });
    }
  }
}

void ParameterOrigins::operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Call call{runtime::operator_info(op)};
  const auto& arguments = op.schema().arguments();
  const auto num_arguments = arguments.size();
  const auto argument = [&](size_t i) -> const c10::IValue& { return torch::jit::peek(stack, i, num_arguments); };
  const bool has_list = num_arguments > 0 && argument(0).isTensorList();
  call.conduct.goes_by_element = call.conduct.goes_by_element && has_list;
  call.origins.resize(call.conduct.goes_by_element ? std::max<size_t>(argument(0).toTensorList().size(), 1) : 1);
  const bool replaces_data = call.info.kind == OperatorClass::kReplacesData;
  for (size_t i = 0; i < num_arguments; ++i) {
    const bool is_read = !arguments[i].is_out() && !(i == 0 && (call.conduct.overwrites_first || replaces_data)) &&
                         !(i > 0 && call.conduct.takes_first_only) && !call.conduct.takes_shape_only;
    runtime::for_each_tensor(argument(i), [&](int element, const at::Tensor& tensor) {
      const Origin origin = origin_of(tensor, call.info.name);  // also: knows its memory from now on
      if (is_read) call.add(element, origin);
      if (call.info.argument_written[i] || (replaces_data && i == 0)) call.written.emplace_back(element, tensor);
      if (call.info.argument_written[i]) keep_copy(tensor);
    });
  }
  if (call.info.kind == OperatorClass::kReadsValue || call.info.kind == OperatorClass::kAnsweredByIdentity) {
    note_values_read(call.origins[0], call.info.name);
  }
  if (call.conduct.is_collective) call.origins.assign(1, {});
  if (replaces_data) {
    for (const auto& [element, tensor] : call.written) write(tensor, call.origin(element), call.info.name);
    call.written.clear();
  }
  runtime::pass_on(*this, op, stack);
  for (const auto& [element, tensor] : call.written) write(tensor, call.origin(element), call.info.name);
  take_results(call, torch::jit::last(stack, op.schema().returns().size()));
}

void ParameterOrigins::take_results(const Call& call, c10::ArrayRef<c10::IValue> results) {
  for (const c10::IValue& result : results) {
    runtime::for_each_tensor(result, [&](int element, const at::Tensor& tensor) {
      for_each_dense(tensor, [&](const at::Tensor& dense) {
        if (memories_.contains(dense.storage().unsafeGetStorageImpl())) return;  // a view, or what it has written to
        memory_of(dense).is_of_this_update = true;
        assign(dense, call.origin(element));
      });
    });
  }
}

void ParameterOrigins::values_read(const at::Tensor& tensor, const std::string& reader) {
  if (!parameters_.empty()) note_values_read(origin_of(tensor, reader), reader);  // else between two updates
}

void ParameterOrigins::end() {
  for (size_t p = 0; p < parameters_.size(); ++p) {  // whose data may have been replaced
    static const std::string kReplaced = "what replaces its data";
    Origin origin = origin_of(parameters_[p].tensor, kReplaced);
    origin.add({.one = static_cast<int>(p)}, kReplaced);
    if (origin.is_mixed() && !parameters_[p].tensor.is_alias_of(parameters_[p].data)) note_mix(origin);
  }
}

void ParameterOrigins::keep() {
  for (auto& [storage, memory] : memories_) memory.copy.reset(), memory.written = {};
  parameters_.clear();
}

void ParameterOrigins::put_back() {
  const at::NoGradGuard no_grad;
  for (auto& [storage, memory] : memories_) {
    if (!memory.copy.defined()) continue;
    all_bytes(memory.written).copy_(memory.copy);
    memory.pieces = std::move(memory.pieces_before);
  }
  for (Parameter& each : parameters_) {
    if (!each.tensor.is_alias_of(each.data)) each.tensor.set_data(each.data);
    each.tensor.mutable_grad() = each.gradient;
  }
  std::erase_if(memories_, [](const auto& entry) { return entry.second.is_of_this_update; });
  keep();
}

ParameterOrigins::Memory& ParameterOrigins::memory_of(const at::Tensor& dense) {
  const c10::Storage& storage = dense.storage();
  const auto found = memories_.find(storage.unsafeGetStorageImpl());
  if (found != memories_.end()) return found->second;
  return memories_.emplace(storage.unsafeGetStorageImpl(), Memory{storage.getWeakStorageImpl()}).first->second;
}

Origin ParameterOrigins::origin_of(const at::Tensor& tensor, const std::string& op) {
  Origin origin;
  for_each_dense(tensor, [&](const at::Tensor& dense) {
    const auto [begin, end] = bytes_of(dense);
    for (const Piece& piece : memory_of(dense).pieces) {
      if (overlaps(piece, begin, end)) origin.add(piece.origin, op);
    }
  });
  return origin;
}

void ParameterOrigins::keep_copy(const at::Tensor& written) {
  const at::NoGradGuard no_grad;
  for_each_dense(written, [&](const at::Tensor& dense) {
    Memory& memory = memory_of(dense);
    if (memory.is_of_this_update || memory.copy.defined() || dense.storage().nbytes() == 0) return;
    memory.written = dense.storage();
    memory.copy = all_bytes(memory.written).clone();
    memory.pieces_before = memory.pieces;
  });
}

void ParameterOrigins::assign(const at::Tensor& made, const Origin& origin) {
  static const std::string kOverlap = "a write between its elements";
  for_each_dense(made, [&](const at::Tensor& dense) {
    const auto [begin, end] = bytes_of(dense);
    const bool has_gaps = end - begin != dense.numel() * static_cast<int64_t>(dense.itemsize());
    std::vector<Piece>& pieces = memory_of(dense).pieces;
    Piece fresh{begin, end, origin};
    std::vector<Piece> others;
    for (const Piece& piece : pieces) {
      if (!overlaps(piece, begin, end)) {
        others.push_back(piece);
        continue;
      }
      if (has_gaps) fresh.origin.add(piece.origin, kOverlap);
      if (piece.begin < begin) others.push_back({piece.begin, begin, piece.origin});
      if (piece.end > end) others.push_back({end, piece.end, piece.origin});
    }
    if (fresh.origin.exists() && begin < end) others.push_back(fresh);
    pieces = std::move(others);
  });
}

// A parameter stays what it is, whatever is written into it.
void ParameterOrigins::write(const at::Tensor& written, Origin origin, const std::string& op) {
  for_each_dense(written, [&](const at::Tensor& dense) {
    const auto [begin, end] = bytes_of(dense);
    const Memory& memory = memory_of(dense);
    for (const Piece& parameter : memory.parameters) {
      if (!overlaps(parameter, begin, end)) continue;
      note_reads_before(parameter.origin.one);
      origin.add(parameter.origin, op);
    }
    if (origin.is_mixed() && !memory.is_of_this_update) note_mix(origin);
    assign(dense, origin);
  });
}

void ParameterOrigins::note_mix(const Origin& origin) {
  if (!finding_.empty()) return;
  const auto name = [&](int parameter) { return "'" + parameters_[static_cast<size_t>(parameter)].name + "'"; };
  finding_ = *origin.operator_name + " puts together what comes from " + name(origin.one) + " and " + name(origin.other);
}

void ParameterOrigins::note_values_read(const Origin& origin, const std::string& op) {
  if (origin.is_mixed()) note_mix(origin);
  if (origin.exists()) read_.emplace_back(origin.one, op);
}

void ParameterOrigins::note_reads_before(int parameter) {
  const auto name = [&](int p) { return "'" + parameters_[static_cast<size_t>(p)].name + "'"; };
  for (const auto& [other, op] : read_) {
    if (other == parameter || !finding_.empty()) continue;
    finding_ = op + " reads a value that comes from " + name(other) + ", and " + name(parameter) + " is updated before " +
               name(other) + ", perhaps by this value";
  }
  std::erase_if(read_, [&](const auto& each) { return each.first == parameter; });
}

}  // namespace smp::engine
