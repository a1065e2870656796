// Which parameters that what an update computes comes from, followed operator by operator. Knows no ranks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/capture/interceptor.h"

namespace smp::engine {

/// Of a value: no parameter, one, or several, of which two are known and the operator that put them together.
struct Origin {
  static constexpr int kNone = -1;
  int one = kNone, other = kNone;
  const std::string* operator_name = nullptr;

  bool exists() const { return one != kNone; }
  bool is_mixed() const { return other != kNone; }
  void add(const Origin& more, const std::string& op);
};

/// Watches the updates of an optimizer, one after the other:
///
///   origins.begin(parameters);
///   { const runtime::InterceptScope scope(origins); optimizer.step(); }
///   origins.end();
///   origins.finding().empty() ? origins.keep() : origins.put_back();
///
/// Origins belong to bytes of storages, so that views, in-place operators and out= need no rules of their own. What is made
/// in one update is known in the next. Copies are made of what an update writes to, at the first write.
class ParameterOrigins : public runtime::Interceptor {
 public:
  /// A parameter that lives here, and tensors beside its gradient that come from it if no update has made them.
  struct Followed {
    at::Tensor parameter;
    std::string name;
    std::vector<at::Tensor> state{};
  };

  void begin(const std::vector<Followed>& parameters);
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;
  /// For a language that reads values without an operator: `reader` is its name for that.
  void values_read(const at::Tensor& tensor, const std::string& reader);
  void end();
  /// The first use of what comes from several parameters, as a clause: "aten::stack puts together what comes from ...".
  const std::string& finding() const { return finding_; }
  /// Forgets the copies.
  void keep();
  /// Parameters, gradients and everything that operators have written to get the values that they had at begin().
  void put_back();

 private:
  struct Piece {
    int64_t begin, end;  // bytes of the storage
    Origin origin;
  };
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // whose address stays its own as long as this lives
    bool is_of_this_update = false;
    std::vector<Piece> pieces{};      // with an origin; they do not overlap
    std::vector<Piece> parameters{};  // that lie here, whatever is written
    c10::Storage written{};           // with copies of what was there
    at::Tensor copy{};
    std::vector<Piece> pieces_before{};
  };
  struct Parameter {
    at::Tensor tensor, data, gradient;
    std::string name;
  };
  struct Call;

  Memory& memory_of(const at::Tensor& dense);
  Origin origin_of(const at::Tensor& tensor, const std::string& op);
  void keep_copy(const at::Tensor& written);
  void assign(const at::Tensor& made, const Origin& origin);
  void write(const at::Tensor& written, Origin origin, const std::string& op);
  void note_values_read(const Origin& origin, const std::string& op);
  void note_mix(const Origin& origin);
  void note_reads_before(int parameter);
  void take_results(const Call& call, c10::ArrayRef<c10::IValue> results);

  std::vector<Parameter> parameters_;
  std::unordered_map<const c10::StorageImpl*, Memory> memories_;
  std::vector<std::pair<int, std::string>> read_;  // parameters not updated since, and by which operator
  std::string finding_;
};

}  // namespace smp::engine
