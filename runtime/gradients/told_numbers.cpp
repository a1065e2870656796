#include "runtime/gradients/told_numbers.h"

#include <c10/util/Exception.h>

#include <memory>
#include <utility>

#include "runtime/libtorch/memory_tensor.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {

ToldNumbers::ToldNumbers(const at::Tensor& numbers)
    : device_(device_holding(numbers)), memory_(device_.allocate_pinned(static_cast<int64_t>(numbers.nbytes()))) {
  device_.start_copy(memory_.get(), data_of(numbers), static_cast<int64_t>(numbers.nbytes()));
  end_ = device_.record();
}

ToldNumbers::~ToldNumbers() {
  bool is_over = false;
  try {
    is_over = are_there();
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): a device that has failed; whoever uses it next hears why
  }
  if (!is_over) abandon(std::make_shared<c10::DataPtr>(std::move(memory_)));
}

}  // namespace smp::runtime
