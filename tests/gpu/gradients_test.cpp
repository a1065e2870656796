// Gradients of replicas that are threads on the one GPU: summed beside the rest of what each gives it to do.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "runtime/gradients/gradient_reducer.h"
#include "tests/gpu/ranks_on_gpu.h"

namespace smp::runtime {
namespace {

constexpr int kReplicas = 2, kParameters = 12, kSteps = 40;
constexpr int64_t kOfOne = 1 << 16;  // elements; a bucket holds three parameters

bool has_gradient(int replica, int step, int parameter) { return (replica + step + parameter) % 3 > 0 && parameter % 5 > 0; }
float gradient_of(int replica, int step, int parameter) {
  return static_cast<float>(100 * step + parameter) + 0.5F * static_cast<float>(replica);
}
float mean_of(int step, int parameter) {
  float sum = 0;
  for (int r = 0; r < kReplicas; ++r) sum += has_gradient(r, step, parameter) ? gradient_of(r, step, parameter) : 0;
  return sum / kReplicas;
}

struct Replica {
  explicit Replica(Transport& all, ReducerOptions options = {}) : replicas(all) {
    for (int i = 0; i < kParameters; ++i) {
      parameters.push_back(torch::zeros({kOfOne}, at::TensorOptions(at::kCUDA).requires_grad(true)));
    }
    options.bucket_bytes = 3 * kOfOne * static_cast<int64_t>(sizeof(float));
    reducer = std::make_unique<GradientReducer>(parameters, replicas, options);
  }

  /// As a backward does: from the last to the first, each behind work of its own.
  void make_gradients(int step, const std::function<void(int parameter)>& look = {}) {
    reducer->begin(kReplicas);
    for (int i = kParameters; i-- > 0;) {
      if (i % 4 == 0) tests::something_slow();
      if (has_gradient(replicas.rank(), step, i)) {
        parameters[static_cast<size_t>(i)].mutable_grad() =
            torch::full({kOfOne}, gradient_of(replicas.rank(), step, i), at::kCUDA);
      }
      if (look) look(i);
      reducer->add_ready({static_cast<size_t>(i)});
    }
    reducer->finish();
  }

  void clear() {
    for (at::Tensor& parameter : parameters) parameter.mutable_grad() = at::Tensor();
  }

  Transport& replicas;
  std::vector<at::Tensor> parameters;
  std::unique_ptr<GradientReducer> reducer;
};

// Directly, or by way of the host.
class GradientsOnGpu : public testing::TestWithParam<bool> {
 protected:
  static void on_each(const std::function<void(Transport&)>& body) { tests::run_on_gpu(kReplicas, GetParam(), body); }
};

// Read, and freed at once, behind work that the GPU has not come to yet: their memory is not used again before.
TEST_P(GradientsOnGpu, AreMeansOfThoseThatReplicasHave) {
  on_each([](Transport& replicas) {
    Replica replica(replicas);
    at::Tensor worst = torch::zeros({}, at::kCUDA);
    for (int step = 0; step < kSteps; ++step) {
      replica.make_gradients(step);
      tests::something_slow();
      for (int i = 0; i < kParameters; ++i) {
        const at::Tensor& mean = replica.parameters[static_cast<size_t>(i)].grad();
        const bool is_anywhere = has_gradient(0, step, i) || has_gradient(1, step, i);
        ASSERT_EQ(mean.defined(), is_anywhere) << "step " << step << ", parameter " << i;
        if (is_anywhere) worst = at::maximum(worst, (mean - mean_of(step, i)).abs().max());
      }
      replica.clear();
    }
    EXPECT_EQ(worst.item<float>(), 0);
  });
}

TEST_P(GradientsOnGpu, AreAddedUpOverSteps) {
  on_each([](Transport& replicas) {
    Replica replica(replicas);
    for (int step = 0; step < kSteps; ++step) {
      replica.reducer->begin(kReplicas);
      for (int i = kParameters; i-- > 0;) {
        at::Tensor& parameter = replica.parameters[static_cast<size_t>(i)];
        if (i % 4 == 0) tests::something_slow();
        if (parameter.grad().defined()) {
          parameter.mutable_grad().add_(1);
        } else {
          parameter.mutable_grad() = torch::ones_like(parameter);
        }
        replica.reducer->add_ready({static_cast<size_t>(i)});
      }
      replica.reducer->finish();
    }
    for (const at::Tensor& parameter : replica.parameters) EXPECT_TRUE(parameter.grad().eq(kSteps).all().item<bool>());
  });
}

TEST_P(GradientsOnGpu, ThatAreNotFiniteAreNamedWhereTheyAre) {
  on_each([](Transport& replicas) {
    Replica replica(replicas, {.looks_for_nonfinite = true});
    replica.make_gradients(3, [&](int i) {
      at::Tensor& gradient = replica.parameters[static_cast<size_t>(i)].mutable_grad();
      if (!gradient.defined() || replicas.rank() != 1) return;
      if (i == 7) gradient[5] = std::numeric_limits<float>::quiet_NaN();
      if (i == 8) gradient.fill_(3e38F);  // finite, but not its norm
    });
    const std::vector<size_t> want = replicas.rank() == 1 ? std::vector<size_t>{7} : std::vector<size_t>{};
    EXPECT_EQ(replica.reducer->take_nonfinite(), want);
  });
}

TEST_P(GradientsOnGpu, GoThroughAHook) {
  on_each([](Transport& replicas) {
    const auto twice = [&](const at::Tensor& gradients, int64_t /*index*/, bool /*is_last*/) {
      at::Tensor sum = gradients.clone();
      replicas.all_reduce_sum(memory_of(sum), sum.scalar_type());
      return sum;
    };
    Replica replica(replicas, {.hook = twice});
    for (int step = 0; step < 3; ++step) {
      replica.make_gradients(step);
      for (int i = 0; i < kParameters; ++i) {
        const at::Tensor& sum = replica.parameters[static_cast<size_t>(i)].grad();
        ASSERT_EQ(sum.defined(), has_gradient(0, step, i) || has_gradient(1, step, i));
        if (!sum.defined()) continue;
        EXPECT_TRUE(sum.eq(kReplicas * mean_of(step, i)).all().item<bool>()) << "step " << step << ", parameter " << i;
      }
      replica.clear();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, GradientsOnGpu, testing::Values(false, true), tests::way_name);

}  // namespace
}  // namespace smp::runtime
