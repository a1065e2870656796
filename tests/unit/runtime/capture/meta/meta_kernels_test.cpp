// Runs the sweep of aten calls on the CPU and on meta and compares geometry; tests the refusals and
// the promises of runtime/capture/meta/meta_kernels.h.
#include "tests/unit/runtime/capture/meta/meta_kernels_test.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "runtime/capture/meta/meta_kernels.h"

namespace smp::test {

namespace {

struct Geometry {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool requires_grad;
  bool operator==(const Geometry&) const = default;
};

std::ostream& operator<<(std::ostream& stream, const Geometry& geometry) {
  return stream << at::IntArrayRef(geometry.sizes) << " strides " << at::IntArrayRef(geometry.strides) << ' '
                << geometry.dtype << (geometry.requires_grad ? " requires_grad" : "");
}

struct Outcome {
  std::vector<Geometry> results;
  std::optional<std::string> error;
};

std::string text_of(const std::vector<Geometry>& results) {
  std::ostringstream text;
  for (const auto& result : results) text << "[" << result << "] ";
  return text.str();
}

Outcome outcome_of(const Call& call, const Inputs& inputs) {
  Outcome outcome;
  try {
    for (const Tensor& tensor : call.run(inputs)) {
      outcome.results.push_back(
          {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.requires_grad()});
    }
  } catch (const c10::Error& error) {
    outcome.error = error.what_without_backtrace();
  }
  return outcome;
}

const std::vector<Call>& all_calls() {
  static const std::vector<Call> calls = [] {
    std::vector<Call> all = pointwise_calls();
    for (const auto& more : {network_calls(), loss_calls(), reduction_calls(), indexing_calls()}) {
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }();
  return calls;
}

int count_working_on_meta() {
  int num_working = 0;
  for (const Call& call : all_calls()) num_working += outcome_of(call, {.device = at::kMeta}).error ? 0 : 1;
  return num_working;
}

}  // namespace

int num_working_before() {
  static const int num_working = [] {
    const int before = count_working_on_meta();
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([] { runtime::register_meta_kernels(); });
    for (auto& thread : threads) thread.join();
    return before;
  }();
  return num_working;
}

namespace {

std::vector<Geometry> without_strides(std::vector<Geometry> results) {
  for (auto& result : results) result.strides.clear();
  return results;
}

/// Some calls of the sweep are deprecated or warn of small inputs; that is no finding here.
class Quiet final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

/// Compares every call that the CPU accepts with these inputs. Returns the number compared. Calls
/// in `stride_exceptions` may differ in strides only, and must.
int compare_with_cpu(const Inputs& inputs, const std::set<std::string>& stride_exceptions = {}) {
  Quiet quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  int num_compared = 0;
  Inputs meta_inputs = inputs;
  meta_inputs.device = at::kMeta;
  for (const Call& call : all_calls()) {
    const Outcome real = outcome_of(call, inputs);
    if (real.error) continue;
    ++num_compared;
    const Outcome meta = outcome_of(call, meta_inputs);
    if (meta.error) {
      ADD_FAILURE() << call.text << "\n  fails on meta: " << *meta.error;
      continue;
    }
    const bool may_differ = stride_exceptions.count(call.text) > 0;
    const bool is_equal =
        may_differ ? without_strides(real.results) == without_strides(meta.results) : real.results == meta.results;
    EXPECT_TRUE(is_equal) << call.text << "\n  cpu:  " << text_of(real.results) << "\n  meta: " << text_of(meta.results);
    EXPECT_TRUE(!may_differ || !kIsOldestTorch || real.results != meta.results) << call.text << " is no exception any more";
  }
  return num_compared;
}

TEST_F(MetaKernels, SweepHasEqualGeometryInFloat32) {
  EXPECT_EQ(compare_with_cpu({}), static_cast<int>(all_calls().size()));
}

TEST_F(MetaKernels, SweepHasEqualGeometryAndGradientsWhenInputsRequireThem) {
  EXPECT_GE(compare_with_cpu({.requires_grad = true}), 500);
}

TEST_F(MetaKernels, SweepHasEqualGeometryInFloat64) { EXPECT_GE(compare_with_cpu({.dtype = at::kDouble}), 500); }

TEST_F(MetaKernels, SweepHasEqualGeometryInBfloat16) { EXPECT_GE(compare_with_cpu({.dtype = at::kBFloat16}), 400); }

TEST_F(MetaKernels, SweepHasEqualGeometryInHalf) { EXPECT_GE(compare_with_cpu({.dtype = at::kHalf}), 400); }

// Here core's own Meta kernel or composite predicts other strides than its CPU kernel has.
const std::set<std::string> kChannelsLastExceptions = {
    "at::reflection_pad3d(x.f({2, 3, 4, 5, 6}), {1, 1, 1, 1, 1, 1})",
    "at::replication_pad2d(x.f({2, 3, 8, 9}), {1, 1, 1, 1})",
    "at::group_norm(x.f({2, 4, 4, 5}), 2, x.f({4}), x.f({4}))",  // call_on_meta puts this right
};
const std::set<std::string> kTransposedExceptions = {
    "at::max_pool1d(x.f({2, 3, 9}), 2)",
    "at::one_hot(x.i({2, 3}), 4)",  // call_on_meta puts this right
};

TEST_F(MetaKernels, SweepHasEqualGeometryInChannelsLast) {
  EXPECT_GE(compare_with_cpu({.layout = Layout::kChannelsLast}, kChannelsLastExceptions), 500);
}

TEST_F(MetaKernels, SweepHasEqualGeometryWhenTransposed) {
  EXPECT_GE(compare_with_cpu({.layout = Layout::kTransposed}, kTransposedExceptions), 500);
}

TEST_F(MetaKernels, SweepHasEqualGeometryInChannelsLastWithOtherDtypes) {
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    EXPECT_GE(compare_with_cpu({.dtype = dtype, .layout = Layout::kChannelsLast}, kChannelsLastExceptions), 400);
  }
}

TEST_F(MetaKernels, RegistrationMakesEveryCallOfTheSweepWork) {
  const int num_after = count_working_on_meta();
  RecordProperty("working_before", num_working_before());
  RecordProperty("working_after", num_after);
  EXPECT_GE(all_calls().size(), 400U);
  EXPECT_LT(num_working_before(), num_after);
  EXPECT_EQ(num_after, static_cast<int>(all_calls().size()));
}

TEST_F(MetaKernels, EveryOperatorWithACpuKernelHasAMetaKernelOrAComposite) {
  using Key = c10::DispatchKey;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || !op || !op->hasKernelForDispatchKey(Key::CPU)) continue;
    bool can_run = false;
    for (const Key key : {Key::Meta, Key::CompositeExplicitAutograd, Key::CompositeImplicitAutograd,
                          Key::CompositeExplicitAutogradNonFunctional}) {
      can_run = can_run || op->hasKernelForDispatchKey(key);
    }
    EXPECT_TRUE(can_run) << name;
  }
}

TEST_F(MetaKernels, SecondRegistrationChangesNothing) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::kthvalue", "values");
  const std::string before = op.dumpState();
  runtime::register_meta_kernels();
  EXPECT_EQ(op.dumpState(), before);
}

/// Expects that `call` throws a NotImplementedError whose text names `operator_name`.
template <typename Function>
void expect_refused(const std::string& operator_name, const Function& call) {
  try {
    call();
    ADD_FAILURE() << operator_name << " was not refused";
  } catch (const c10::NotImplementedError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find(operator_name), std::string::npos) << text;
  }
}

TEST_F(MetaKernels, OperatorsThatDependOnValuesAreRefusedByName) {
  const Tensor x = at::empty({3, 3}, at::kMeta);
  const Tensor one = at::empty({}, at::kMeta);
  const Tensor mask = at::empty({3, 3}, at::TensorOptions(at::kMeta).dtype(at::kBool));
  const Tensor counts = at::empty({3}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  expect_refused("aten::_local_scalar_dense", [&] { one.item(); });
  expect_refused("aten::equal", [&] { at::equal(x, x); });
  expect_refused("aten::is_set_to", [&] { x.is_set_to(x); });
  expect_refused("aten::nonzero", [&] { at::nonzero(x); });
  expect_refused("aten::masked_select", [&] { at::masked_select(x, mask); });
  if (kIsOldestTorch) expect_refused("aten::masked_select", [&] { at::combinations(counts); });
  expect_refused("aten::_unique2", [&] { at::_unique2(x); });
  expect_refused("aten::unique_dim", [&] { at::unique_dim(x, 0); });
  expect_refused("aten::bincount", [&] { at::bincount(counts); });
  expect_refused("aten::repeat_interleave", [&] { at::repeat_interleave(counts); });
  expect_refused("aten::to_mkldnn", [&] { x.to_mkldnn(); });
}

TEST_F(MetaKernels, RefusalOfAReadValueSaysThatTheModelIsBeingCaptured) {
  try {
    at::empty({}, at::kMeta).item();
    FAIL() << "item() was not refused";
  } catch (const c10::NotImplementedError& error) {
    EXPECT_NE(std::string(error.what()).find("was read while its model is being captured"), std::string::npos);
  }
}

TEST_F(MetaKernels, WrongSizesAreReportedWithTheOperatorThatWasRunOnZeros) {
  const Tensor x = at::empty({2, 3}, at::kMeta);
  try {
    at::multi_margin_loss(x, at::empty({5}, at::TensorOptions(at::kMeta).dtype(at::kLong)));
    FAIL() << "a target of the wrong size was accepted";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("aten::multi_margin_loss"), std::string::npos) << error.what();
  }
}

TEST_F(MetaKernels, RandomOperatorsLeaveTheGeneratorsUntouched) {
  const Tensor x = at::empty({2, 3}, at::kMeta);
  Tensor out = at::empty({0}, at::kMeta), noise = at::empty({2, 3}, at::kMeta);
  Tensor picks = at::empty({0}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  auto own = at::detail::createCPUGenerator(7);
  const auto states = [&] {
    return at::stack({at::globalContext().defaultGenerator(at::kCPU).get_state(), own.get_state()}).clone();
  };
  at::manual_seed(42);
  const Tensor before = states();
  for (const std::optional<at::Generator>& generator : {std::optional<at::Generator>(), std::optional(own)}) {
    at::bernoulli_out(out, x, generator);
    at::multinomial_out(picks, x, 2, false, generator);
    at::rrelu_with_noise_out(out, x, noise, 0.1, 0.3, /*training=*/true, generator);
    at::_standard_gamma(x, generator);
    at::poisson(x, generator);
    at::multinomial(x, 2, false, generator);
    at::randperm(5, generator, at::TensorOptions(at::kMeta));
  }
  at::native_dropout(x, 0.5, true);
  EXPECT_TRUE(at::equal(before, states()));
}

TEST_F(MetaKernels, InPlaceAndOutArgumentsAreHandedBack) {
  Tensor x = at::empty({2, 3}, at::kMeta);
  Tensor out = at::empty({0}, at::kMeta);
  EXPECT_TRUE(x.relu_().is_same(x));
  EXPECT_TRUE(at::hardtanh_(x).is_same(x));
  EXPECT_TRUE(at::take_out(out, x, at::empty({4}, at::TensorOptions(at::kMeta).dtype(at::kLong))).is_same(out));
  EXPECT_EQ(out.sizes(), at::IntArrayRef({4}));
}

TEST_F(MetaKernels, AnAssertionOnAValueIsTakenToHold) {
  EXPECT_NO_THROW(at::_assert_async(at::empty({}, at::kMeta), "never reached"));
}

TEST_F(MetaKernels, ResultsThatShareStorageOnTheCpuShareItOnMeta) {
  const auto shares = [](at::Device device) {
    const auto [query, key, value] =
        at::_transform_bias_rescale_qkv(at::ones({2, 3, 12}, device), at::ones({12}, device), 2);
    return std::make_tuple(query.is_alias_of(key), query.is_alias_of(value), key.storage_offset(), value.storage_offset(),
                           value.storage().nbytes());
  };
  EXPECT_TRUE(std::get<0>(shares(at::kCPU)));
  EXPECT_EQ(shares(at::kCPU), shares(at::kMeta));
}

TEST_F(MetaKernels, AutocastAndInferenceModeDoNotChangeGeometry) {
  const Tensor x = at::empty({1, 1, 2, 2}, at::TensorOptions(at::kMeta).dtype(at::kBFloat16));
  const Tensor index = at::empty({1, 1, 2, 2}, at::TensorOptions(at::kMeta).dtype(at::kLong));
  at::autocast::set_autocast_enabled(at::kCPU, true);
  EXPECT_EQ(at::max_unpool2d(x, index, {4, 4}).scalar_type(), at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  const c10::InferenceMode inference;
  EXPECT_EQ(std::get<0>(at::kthvalue(at::empty({2, 8}, at::kMeta), 2, 1)).sizes(), at::IntArrayRef({2}));
}

}  // namespace
}  // namespace smp::test
