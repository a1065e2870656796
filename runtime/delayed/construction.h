// Records the construction of modules in place of doing it. Replays nothing.
#pragma once

#include <memory>

#include "runtime/capture/interceptor.h"
#include "runtime/delayed/recording.h"

namespace smp::runtime {

struct OperatorInfo;

/// How the program's language makes tensors of literals.
enum class Literals {
  kThroughPointers,  // LibTorch's torch::tensor(vector): a one-dimensional empty() with a device, filled through its pointer
  kHidden,           // Python's torch.tensor: no operator calls anybody to make it
};

/// While it intercepts, tensors are made without values (unmade.h). What fills them is recorded, and the default generator
/// moves on as if it had been done. Values that are read, by item() or by tensors that have data, are computed at once.
class Construction : public Interceptor {
 public:
  explicit Construction(Literals literals);
  void operator_called(const c10::OperatorHandle& op, torch::jit::Stack& stack) override;

 private:
  void record(const c10::OperatorHandle& op, const OperatorInfo& info, torch::jit::Stack& stack);

  Literals literals_;
  std::shared_ptr<DelayedRecording> recording_;  // of tensors that are made of no others
};

/// Records what this thread constructs while it lives; a scope within another one adds nothing.
/// PartitionGuards around and within it see the tensors.
class ConstructionScope {
 public:
  explicit ConstructionScope(Literals literals = Literals::kThroughPointers);
  ~ConstructionScope();
  ConstructionScope(const ConstructionScope&) = delete;
  ConstructionScope& operator=(const ConstructionScope&) = delete;
  /// Whether this thread is inside of one.
  static bool is_open();

 private:
  Construction construction_;
  InterceptScope scope_;
};

}  // namespace smp::runtime
