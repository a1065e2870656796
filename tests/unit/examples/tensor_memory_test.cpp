// Counted bytes of tensors against their sizes.
#include "examples/common/tensor_memory.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <thread>

namespace examples {
namespace {

at::Tensor tensor_of(int64_t bytes) { return at::empty({bytes}, at::kByte); }

TEST(TensorMemory, CountsWhatIsHeldAndTheMostAtOnce) {
  const at::Tensor before = tensor_of(5000);
  TensorMemory memory;
  EXPECT_EQ(memory.current_bytes(), 0);
  at::Tensor first = tensor_of(1000);
  at::Tensor second = tensor_of(300);
  second.reset();
  EXPECT_EQ(memory.current_bytes(), 1000);
  EXPECT_EQ(memory.peak_bytes(), 1300);
  memory.forget_peak();
  EXPECT_EQ(memory.peak_bytes(), 1000);
  first.reset();
  EXPECT_EQ(memory.current_bytes(), 0);
  EXPECT_EQ(memory.peak_bytes(), 1000);
}

TEST(TensorMemory, CountsItsOwnThreadOnly) {
  const TensorMemory memory;
  std::thread([] { tensor_of(1000); }).join();
  EXPECT_EQ(memory.peak_bytes(), 0);
}

TEST(TensorMemory, EndsWithItsObject) {
  {
    const TensorMemory memory;
  }
  const TensorMemory next;
  EXPECT_EQ(tensor_of(10).numel(), 10);
  EXPECT_EQ(next.peak_bytes(), 10);
}

}  // namespace
}  // namespace examples
