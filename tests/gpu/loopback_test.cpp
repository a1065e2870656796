// Messages between ranks that are threads, each with a stream of its own on the one GPU: who reads a message waits for who
// has made it, and who writes to its memory again waits for who has read it. The host waits for neither.
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <thread>

#include "runtime/device/links.h"
#include "tests/gpu/ranks_on_gpu.h"

namespace smp::runtime {
namespace {

constexpr int64_t kElements = 1 << 20;

// The messages themselves, or by way of the host as transports move them that know no device.
class LoopbackOnGpu : public testing::TestWithParam<bool> {
 protected:
  static void run(int num_ranks, const std::function<void(Transport&)>& body) {
    tests::run_on_gpu(num_ranks, GetParam(), body);
  }
};

TEST_P(LoopbackOnGpu, MessagesComeBehindWhatMadeThemAndBeforeWhatOverwritesThem) {
  run(2, [](Transport& transport) {
    at::Tensor memory = torch::zeros({kElements}, at::kCUDA), seen = torch::zeros({40}, at::kCUDA);
    for (int i = 0; i < 40; ++i) {
      if (transport.rank() == 0) {
        tests::something_slow();
        memory.fill_(i);
        Request sent = transport.isend(1, 7, memory_of(memory));
        sent.wait("send");
        memory.fill_(-1);  // before the receiver has copied it, if nothing orders the two
      } else {
        Request received = transport.irecv(0, 7, memory_of(memory));
        received.wait("receive");
        seen[i] = memory.min() + memory.max();
        if (i % 3 == 0) tests::something_slow();
      }
    }
    if (transport.rank() == 1) {
      EXPECT_TRUE(at::equal(seen.cpu(), torch::arange(40, at::kFloat) * 2)) << seen.cpu();
    }
  });
}

TEST_P(LoopbackOnGpu, SumsAndBroadcastsTensorsOfTheDevice) {
  run(3, [](Transport& transport) {
    tests::something_slow();
    at::Tensor terms = torch::full({kElements}, transport.rank() + 1, at::TensorOptions(at::kCUDA).dtype(at::kFloat));
    transport.all_reduce_sum(memory_of(terms), terms.scalar_type());
    EXPECT_TRUE(terms.eq(6).all().item<bool>());
    for (const auto dtype : {at::kFloat, at::kDouble, at::kLong, at::kBFloat16, at::kHalf}) {
      for (const int64_t size : {0, 1, 2, 10001}) {  // fewer than ranks: some have nothing to sum
        auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(transport.rank()));
        at::Tensor on_host = torch::randn({size}, generator, at::kDouble).mul_(1000).to(dtype);
        at::Tensor on_device = on_host.to(at::kCUDA);
        transport.all_reduce_sum(memory_of(on_host), dtype);
        transport.all_reduce_sum(memory_of(on_device), dtype);
        EXPECT_TRUE(at::equal(on_device.cpu(), on_host)) << size << " of " << dtype;
      }
    }
    at::Tensor told = torch::full({kElements}, transport.rank(), at::TensorOptions(at::kCUDA).dtype(at::kFloat));
    transport.broadcast(memory_of(told), 2);
    EXPECT_TRUE(told.eq(2).all().item<bool>());
  });
}

// All that one GPU can show of NCCL, which wants one for each end: it is set up on both, and its refusal reaches both.
TEST(LinksOnGpu, TellBothEndsWhatKeepsThemApart) {
  const DeviceLinks* const links = this_ranks_device().links();
  ASSERT_NE(links, nullptr);
  const std::string name = links->new_name();
  tests::run_ranks(2, [&](Transport& transport) {
    const auto link = links->connect(name, transport.rank() == 0 ? DeviceLinks::End::kSender : DeviceLinks::End::kReceiver);
    const at::Tensor memory = torch::zeros({kElements}, at::kCUDA);
    std::string refusal;
    try {
      link->start(memory_of(memory), this_ranks_device().record());
      const auto begin = std::chrono::steady_clock::now();
      while (!link->next_given() && std::chrono::steady_clock::now() - begin < std::chrono::minutes(1)) {
        std::this_thread::yield();
      }
    } catch (const c10::Error& error) {
      refusal = error.what_without_backtrace();
    }
    EXPECT_NE(refusal.find("Duplicate GPU detected"), std::string::npos) << refusal;
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, LoopbackOnGpu, testing::Values(false, true), tests::way_name);

}  // namespace
}  // namespace smp::runtime
