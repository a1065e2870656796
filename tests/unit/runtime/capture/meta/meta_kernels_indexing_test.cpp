// Views, indexing, joining and factory calls of the meta sweep.
#include "tests/unit/runtime/capture/meta/meta_kernels_test.h"

namespace smp::test {
namespace {

using at::indexing::None;
using at::indexing::Slice;

std::vector<Call> view_calls() {
  return {
      SMP_CALL(x.f({2, 3, 4}).view({6, 4})),
      SMP_CALL(x.f({2, 3, 4}).reshape({4, 6})),
      SMP_CALL(x.f({2, 3, 4, 5}).permute({0, 2, 3, 1})),
      SMP_CALL(x.f({2, 3, 4}).transpose(0, 1)),
      SMP_CALL(x.f({2, 3, 4}).transpose(0, 1).reshape({3, 8})),
      SMP_CALL(x.f({2, 3}).t()),
      SMP_CALL(x.f({2, 3, 4, 5}).flatten(1)),
      SMP_CALL(x.f({2, 6}).unflatten(1, {2, 3})),
      SMP_CALL(x.f({2, 1, 3}).squeeze()),
      SMP_CALL(x.f({2, 3}).unsqueeze(1)),
      SMP_CALL(x.f({2, 1}).expand({2, 3})),
      SMP_CALL(x.f({2, 3}).repeat({2, 2})),
      SMP_CALL(x.f({4, 6}).chunk(2, 1)),
      SMP_CALL(x.f({4, 6}).split(4, 1)),
      SMP_CALL(x.f({4, 6}).unbind(0)),
      SMP_CALL(x.f({4, 6}).narrow(1, 1, 3)),
      SMP_CALL(x.f({4, 6}).select(0, 1)),
      SMP_CALL(x.f({4, 6}).slice(1, 0, 6, 2)),
      SMP_CALL(x.f({4, 6}).unfold(1, 3, 2)),
      SMP_CALL(x.f({4, 4}).diagonal()),
      SMP_CALL(at::diag_embed(x.f({2, 3}))),
      SMP_CALL(at::diag(x.f({3}))),
      SMP_CALL(at::movedim(x.f({2, 3, 4}), 0, 2)),
      SMP_CALL(x.f({2, 3}).view_as(x.f({3, 2}))),
      SMP_CALL(at::as_strided(x.f({4, 6}), {2, 2}, {6, 1}, 3)),
      SMP_CALL(x.f({2, 3}).broadcast_to({4, 2, 3})),
      SMP_CALL(at::atleast_3d(x.f({2, 3}))),
      SMP_CALL(at::meshgrid({x.f({2}), x.f({3})}, "ij")),
      SMP_CALL(at::broadcast_tensors({x.f({2, 1}), x.f({3})})),
      SMP_CALL(x.f({2, 3}).detach()),
      SMP_CALL(at::tril(x.f({3, 4}))),
      SMP_CALL(at::flip(x.f({2, 3, 4, 5}), {1, 2})),
      SMP_CALL(at::flip(x.f({0, 3}), {1})),
      SMP_CALL(at::fliplr(x.f({2, 3}))),
      SMP_CALL(at::rot90(x.f({2, 3, 4, 5}), 1, {0, 1})),
      SMP_CALL(at::roll(x.f({2, 3, 4, 5}), 1, 1)),
      SMP_CALL(at::roll(x.f({2, 3, 4, 5}), {1, 2}, {2, 3})),
      SMP_CALL(at::roll(x.f({2, 3}), 1)),
      SMP_CALL(at::roll(x.f({0, 3}), 1, 1)),
      SMP_CALL(at::cat({x.f({2, 3, 4, 5}), x.f({2, 2, 4, 5})}, 1)),
      SMP_CALL(at::stack({x.f({2, 3}), x.f({2, 3})}, 1)),
      SMP_CALL(at::hstack({x.f({2, 3}), x.f({2, 3})})),
      SMP_CALL(at::block_diag({x.f({2, 3}), x.f({2, 3})})),
      SMP_CALL(at::tile(x.f({2, 3}), {2, 1})),
      SMP_CALL(at::_foreach_add({x.f({2, 3}), x.f({4})}, 1)),
      SMP_CALL(at::_foreach_mul({x.f({2, 3}), x.f({4})}, {x.f({2, 3}), x.f({4})})),
  };
}

std::vector<Call> gather_calls() {
  return {
      SMP_CALL(at::index_select(x.f({2, 3, 4, 5}), 1, x.i({2}))),
      SMP_CALL(at::index_select(x.f({2, 3}), -1, x.i({0}))),
      SMP_CALL(at::index_select(x.f({}), 0, x.i({1}, 1))),
      SMP_CALL(at::gather(x.f({2, 3}), 1, x.i({2, 2}))),
      SMP_CALL(at::scatter(x.f({2, 3}), 1, x.i({2, 2}), x.f({2, 2}))),
      SMP_CALL(at::scatter_add(x.f({2, 3}), 1, x.i({2, 2}), x.f({2, 2}))),
      SMP_CALL(at::scatter_reduce(x.f({2, 3}), 1, x.i({2, 2}), x.f({2, 2}), "amax")),
      SMP_CALL(at::take(x.f({2, 3, 4, 5}), x.i({3, 2}))),
      SMP_CALL(at::take_along_dim(x.f({2, 3}), x.i({2, 1}), 1)),
      SMP_CALL(x.f({4, 6}).index({x.i({3})})),
      SMP_CALL(x.f({4, 6, 3}).index({Slice(), x.i({2, 2})})),
      SMP_CALL(x.f({4, 6, 3}).index({x.i({2}), None, Slice(1, 3)})),
      SMP_CALL(x.f({4, 6}).index_put({x.i({3})}, x.f({3, 6}))),
      SMP_CALL(x.f({4, 6}).index_put_({x.b({4, 6})}, x.f({}))),
      SMP_CALL(at::index_add(x.f({4, 6}), 0, x.i({2}), x.f({2, 6}))),
      SMP_CALL(at::index_copy(x.f({4, 6}), 0, at::arange(2, x.options().dtype(at::kLong)), x.f({2, 6}))),
      SMP_CALL(at::index_fill(x.f({4, 6}), 0, x.i({2}), 1)),
      SMP_CALL(at::masked_scatter(x.f({2, 3}), x.b({2, 3}), x.f({6}))),
      SMP_CALL(at::put(x.f({2, 3}), x.i({2}), x.f({2}))),
      SMP_CALL(at::repeat_interleave(x.f({2, 3}), 2)),
      SMP_CALL(at::repeat_interleave(x.f({2, 3}), 2, 1)),
      SMP_CALL(at::repeat_interleave(x.f({2, 3}), x.i({2}).fill_(2), 0, 4)),
      SMP_CALL(at::searchsorted(x.f({5}), x.f({2, 3}))),
      SMP_CALL(at::searchsorted(x.f({5}), 0.5)),
      SMP_CALL(at::bucketize(x.f({2, 3, 4, 5}), x.f({5}), true)),
      SMP_CALL(at::bucketize(0.5, x.f({5}))),
      SMP_CALL(at::multinomial(x.f({2, 5}), 3)),
      SMP_CALL(at::multinomial(x.f({5}), 7, true)),
      SMP_CALL(at::one_hot(x.i({2, 3}), 4)),
      SMP_CALL(at::nonzero_static(x.f({2, 3}), 4)),
      SMP_CALL(at::select_scatter(x.f({2, 3}), x.f({3}), 0, 1)),
      SMP_CALL(at::slice_scatter(x.f({4, 3}), x.f({2, 3}), 0, 0, 2)),
      SMP_CALL(at::isin(x.f({2, 3}), x.f({4}))),
  };
}

std::vector<Call> factory_calls() {
  return {
      SMP_CALL(at::zeros({2, 3}, x.options())),
      SMP_CALL(at::ones_like(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::empty_like(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::full({2, 3}, 1.5, x.options())),
      SMP_CALL(at::arange(0, 7, 2, x.options())),
      SMP_CALL(at::linspace(0, 1, 5, x.options())),
      SMP_CALL(at::logspace(0, 1, 5, 10.0, x.options())),
      SMP_CALL(at::eye(3, x.options())),
      SMP_CALL(at::rand({2, 3}, x.options())),
      SMP_CALL(at::randn_like(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::randint(5, {2, 3}, x.options())),
      SMP_CALL(at::randperm(5, x.options().dtype(at::kLong))),
      SMP_CALL(at::normal(x.f({2, 3}), 1.0)),
      SMP_CALL(at::tril_indices(3, 4, 0, x.options().dtype(at::kLong))),
      SMP_CALL(at::tril_indices(3, 4, -1, x.options().dtype(at::kInt))),
      SMP_CALL(at::triu_indices(3, 4, 1, x.options().dtype(at::kLong))),
      SMP_CALL(at::triu_indices(4, 3, -2, x.options().dtype(at::kLong))),
      SMP_CALL(at::triu_indices(0, 3, 0, x.options().dtype(at::kLong))),
      SMP_CALL(at::hann_window(8, x.options())),
      SMP_CALL(at::vander(x.f({3}))),
      SMP_CALL(at::cartesian_prod({x.f({2}), x.f({3})})),
      SMP_CALL(at::scalar_tensor(1.5, x.options())),
      SMP_CALL(x.f({2, 3}).new_zeros({4})),
  };
}

}  // namespace

std::vector<Call> indexing_calls() {
  auto calls = view_calls();
  for (const auto& more : {gather_calls(), factory_calls()}) calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

}  // namespace smp::test
