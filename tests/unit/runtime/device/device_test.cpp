// What a device promises to those who reach it through the seam.
#include "runtime/device/device.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace smp::runtime {
namespace {

const Device* const kDevices[] = {&host(), &this_ranks_device()};

TEST(Device, AllocatesAlignedMemory) {
  for (const Device* device : kDevices) {
    std::vector<c10::DataPtr> blocks;
    for (const int64_t bytes : {1, 3, 64, 100, 4097}) {
      blocks.push_back(device->allocate(bytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(blocks.back().get()) % Device::kAlignment, 0) << bytes;
      EXPECT_EQ(blocks.back().device().type(), device->type);
    }
  }
}

TEST(Device, CopiesFromTheHostAndBack) {
  const std::string text = "some bytes of the host";
  const auto bytes = static_cast<int64_t>(text.size());
  for (const Device* device : kDevices) {
    const c10::DataPtr there = device->allocate(bytes), twice = device->allocate(bytes);
    device->copy(there.get(), text.data(), bytes);
    device->copy(twice.get(), there.get(), bytes);
    std::string back(text.size(), ' ');
    device->copy(back.data(), twice.get(), bytes);
    EXPECT_EQ(back, text);
    device->copy(nullptr, nullptr, 0);
  }
}

// An operator on its tensors goes where the keys say, and autocast is asked by its type.
TEST(Device, HasTheKeysOfItsTensors) {
  for (const Device* device : kDevices) {
    const at::Tensor tensor = device->empty({2, 3}, at::kFloat);
    EXPECT_EQ(tensor.device().type(), device->type);
    EXPECT_TRUE(tensor.is_contiguous());
    EXPECT_TRUE(tensor.key_set().has(device->backend));
    EXPECT_TRUE(tensor.key_set().has(device->autograd));
    EXPECT_TRUE(c10::getAutocastRelatedKeySetFromBackend(c10::toBackendComponent(device->backend)).has(device->autocast));
  }
}

TEST(Device, DrawsFromItsDefaultGeneratorAndFromNewOnes) {
  for (const Device* device : kDevices) {
    const auto options = at::TensorOptions(at::kFloat).device(device->type);
    at::Generator of_default = device->default_generator(), own = device->new_generator();
    of_default.set_current_seed(7);
    own.set_current_seed(7);
    const at::Tensor drawn = at::rand({5}, options);
    EXPECT_TRUE(at::equal(drawn, at::rand({5}, own, options)));
    EXPECT_FALSE(at::equal(drawn, at::rand({5}, options)));
  }
}

TEST(Device, TellsTimeThatGoesOnAndMemoryThatIsFree) {
  for (const Device* device : kDevices) {
    EXPECT_FALSE(device->model().empty());
    const int64_t before = device->now_ns();
    device->wait(device->record());
    EXPECT_GE(device->now_ns(), before);
    EXPECT_GT(device->free_bytes(), 0);
  }
}

TEST(DeviceClock, TellsTheTimeBetweenMarksOnce) {
  for (const Device* device : kDevices) {
    const auto clock = device->new_clock();
    EXPECT_TRUE(clock->take_us().empty());
    clock->mark();
    EXPECT_TRUE(clock->take_us().empty());
    for (int i = 0; i < 4; ++i) clock->mark();
    const std::vector<double> us = clock->take_us();
    EXPECT_EQ(us.size(), 3);
    for (const double each : us) EXPECT_GE(each, 0);
    EXPECT_TRUE(clock->take_us().empty());
  }
}

TEST(Device, IsFoundByItsTensorsAndOthersAreRefused) {
  EXPECT_EQ(&device_holding(at::ones({2})), &host());
  EXPECT_THROW(device_holding(at::empty({2}, at::kMeta)), c10::NotImplementedError);
  EXPECT_TRUE(is_on_host(at::ones({})));
  EXPECT_FALSE(is_on_host(at::empty({2}, at::kMeta)));
  EXPECT_FALSE(is_on_this_ranks_device(at::empty({2}, at::kMeta)));
}

TEST(TensorBytes, GoInAndOutOfDenseTensors) {
  const at::Tensor tensor = tensor_of_bytes("abcd");
  EXPECT_EQ(bytes_of(tensor), "abcd");
  set_bytes(tensor, "efgh");
  EXPECT_EQ(bytes_of(tensor), "efgh");
  EXPECT_EQ(memory_of(tensor).num_bytes, 4);
  EXPECT_EQ(memory_of(tensor).data, data_of(tensor));
  EXPECT_EQ(memory_of(tensor).device, host().type);
  EXPECT_EQ(bytes_of(tensor_of_bytes("")), "");
  EXPECT_THROW(bytes_of(at::empty({2}, at::kMeta)), c10::ValueError);
}

TEST(StorageBytes, AreThoseOfAllItsTensors) {
  const at::Tensor tensor = tensor_of_bytes("abcd"), meta = at::empty({2}, at::kMeta);
  EXPECT_EQ(bytes_of(tensor.slice(0, 2).storage()), "abcd");
  EXPECT_EQ(data_of(tensor.slice(0, 2).storage()), data_of(tensor));
  EXPECT_EQ(data_of(meta.storage()), nullptr);
  EXPECT_THROW(bytes_of(meta.storage()), c10::ValueError);
}

}  // namespace
}  // namespace smp::runtime
