// tensor.set_data(source) in a body (in Python tensor.data = source), which LibTorch does behind the dispatcher. Of a
// parameter or buffer it is recorded as smp::set_data, which copies; MemoryRules refuses what a copy is not the same for.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string>
#include <vector>

#include "runtime/capture/bindings.h"

namespace smp::runtime {

inline constexpr const char* kSetData = "smp::set_data";

class ReplacedData {
 public:
  struct Call {
    at::Tensor tensor, source;
  };

  explicit ReplacedData(const Bindings& bindings) : bindings_(bindings) {}

  /// Whether LibTorch asks by `op` if a second tensor's data may replace those of a first.
  static bool asks(const c10::OperatorHandle& op);
  /// What it asks for. False: `tensor` is no parameter or buffer. Throws where `source` is of another form; `place` begins
  /// the text.
  bool note(const at::Tensor& tensor, const at::Tensor& source, const std::string& place);
  /// What has been replaced since; it has its own memory again. To be called whenever the body calls something else.
  std::optional<Call> take();
  /// Without telling.
  void give_back() noexcept;
  /// A body begins, or is given up.
  void begin() noexcept {
    give_back();
    replaced_.clear();
  }

 private:
  struct Asked {
    Call call;
    c10::intrusive_ptr<c10::TensorImpl> own;  // on the memory that `tensor` had
  };
  const Bindings& bindings_;
  std::optional<Asked> asked_;
  std::vector<const c10::TensorImpl*> replaced_{};  // in this body; parameters and buffers, which outlive it
};

}  // namespace smp::runtime
