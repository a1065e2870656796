// Reductions, products, linear algebra, sorting and Fourier transforms of the meta sweep.
#include <ATen/core/dispatch/Dispatcher.h>

#include "tests/unit/runtime/capture/meta/meta_kernels_test.h"

namespace smp::test {
namespace {

// Newer LibTorch has linalg_cholesky only.
Tensor older_cholesky(const Tensor& matrix) {
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::cholesky", ""});
  return op ? op->typed<Tensor(const Tensor&, bool)>().call(matrix, false) : at::linalg_cholesky(matrix);
}

std::vector<Call> full_and_partial_calls() {
  return {
      SMP_CALL(at::linspace(x.f({}), x.f({}), 5)),
      SMP_CALL(at::linspace(2.0, x.f({}), 5)),
      SMP_CALL(at::logspace(x.f({}), 3.0, 5, 2.0)),
      SMP_CALL(at::sum(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::sum(x.f({2, 3, 4, 5}), {1, 3}, true)),
      SMP_CALL(at::sum(x.i({2, 3}))),
      SMP_CALL(at::mean(x.f({2, 3, 4, 5}), {2, 3})),
      SMP_CALL(at::nansum(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::nansum(x.f({2, 3, 4, 5}), {1, -1}, true)),
      SMP_CALL(at::nansum(x.i({2, 3}), {1})),
      SMP_CALL(at::nanmean(x.f({2, 3, 4, 5}), {1})),
      SMP_CALL(at::max(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::min(x.i({2, 3}))),
      SMP_CALL(at::max(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::amax(x.f({2, 3, 4, 5}), {1})),
      SMP_CALL(at::aminmax(x.f({2, 3}))),
      SMP_CALL(at::argmax(x.f({2, 3}))),
      SMP_CALL(at::argmin(x.f({2, 3}), 1)),
      SMP_CALL(at::median(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::median(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::nanmedian(x.f({2, 3}))),
      SMP_CALL(at::nanmedian(x.f({2, 3}), 1, true)),
      SMP_CALL(at::mode(x.f({2, 3}), 1)),
      SMP_CALL(at::kthvalue(x.f({2, 3, 4, 5}), 2, 1)),
      SMP_CALL(at::quantile(x.f({2, 3}), 0.5, 1)),
      SMP_CALL(at::nanquantile(x.f({2, 3}), 0.5, 1)),
      SMP_CALL(at::prod(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::prod(x.i({2, 3}))),
      SMP_CALL(at::prod(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::prod(x.i({2, 3}), at::kFloat)),
      SMP_CALL(at::var(x.f({2, 3, 4, 5}), {1}, 1)),
      SMP_CALL(at::var(x.f({2, 3, 4, 5}), true)),
      SMP_CALL(at::var(x.c({2, 3}), {1}, 1)),
      SMP_CALL(at::std(x.f({2, 3, 4, 5}), {1, 2}, 0, true)),
      SMP_CALL(at::std(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::var_mean(x.f({2, 3, 4, 5}), {1}, 1)),
      SMP_CALL(at::var_mean(x.c({2, 3}), {0}, 1, true)),
      SMP_CALL(at::std_mean(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::count_nonzero(x.f({2, 3, 4, 5}), at::IntArrayRef{1})),
      SMP_CALL(at::count_nonzero(x.f({2, 3}))),
      SMP_CALL(at::logsumexp(x.f({2, 3, 4, 5}), {1})),
      SMP_CALL(at::any(x.f({2, 3}))),
      SMP_CALL(at::all(x.f({2, 3}), 1)),
      SMP_CALL(at::cumsum(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::cumprod(x.f({2, 3}), 1)),
      SMP_CALL(at::cummax(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::cummin(x.f({2, 3}), 1)),
      SMP_CALL(at::logcumsumexp(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::histc(x.f({20}), 5)),
      SMP_CALL(at::histogram(x.f({20}), 5)),
      SMP_CALL(at::trace(x.f({3, 3}))),
      SMP_CALL(at::trace(x.i({3, 3}))),
      SMP_CALL(at::sort(x.f({2, 3, 4, 5}), 1)),
      SMP_CALL(at::argsort(x.f({2, 3}), /*stable=*/true, 1)),
      SMP_CALL(at::topk(x.f({2, 3, 4, 5}), 2, 1)),
      SMP_CALL(at::msort(x.f({2, 3}))),
      SMP_CALL(at::segment_reduce(x.f({6, 3}), "sum", x.i({3}).fill_(2), {}, {}, 0, true)),
      SMP_CALL(at::sum(x.f({0, 3}), {0})),
      SMP_CALL(at::var(x.f({0, 3}), {0}, 1)),
      SMP_CALL(at::prod(x.f({0}))),
      SMP_CALL(at::trapezoid(x.f({2, 3}))),
      SMP_CALL(at::diff(x.f({2, 3}))),
  };
}

std::vector<Call> product_calls() {
  return {
      SMP_CALL(at::dot(x.f({3}), x.f({3}))),
      SMP_CALL(at::vdot(x.f({3}), x.f({3}))),
      SMP_CALL(at::vdot(x.c({3}), x.c({3}))),
      SMP_CALL(at::mv(x.f({2, 3}), x.f({3}))),
      SMP_CALL(at::mm(x.f({2, 3}), x.f({3, 4}))),
      SMP_CALL(at::mm(x.f({2, 3}), x.f({4, 3}).t())),
      SMP_CALL(at::bmm(x.f({2, 3, 4}), x.f({2, 4, 5}))),
      SMP_CALL(at::bmm(x.f({2, 3, 4}), x.f({2, 5, 4}).transpose(1, 2))),
      SMP_CALL(at::matmul(x.f({2, 3, 4}), x.f({4, 5}))),
      SMP_CALL(at::matmul(x.f({2, 1, 3, 4}), x.f({5, 4, 3}))),
      SMP_CALL(at::matmul(x.f({4}), x.f({4}))),
      SMP_CALL(at::addmm(x.f({4}), x.f({2, 3}), x.f({3, 4}))),
      SMP_CALL(at::addmv(x.f({2}), x.f({2, 3}), x.f({3}))),
      SMP_CALL(at::addr(x.f({2, 3}), x.f({2}), x.f({3}))),
      SMP_CALL(at::baddbmm(x.f({2, 3, 5}), x.f({2, 3, 4}), x.f({2, 4, 5}))),
      SMP_CALL(at::addbmm(x.f({3, 5}), x.f({2, 3, 4}), x.f({2, 4, 5}))),
      SMP_CALL(at::addbmm(x.f({5}), x.f({2, 3, 4}), x.f({2, 4, 5}))),
      SMP_CALL(at::outer(x.f({2}), x.f({3}))),
      SMP_CALL(at::kron(x.f({2, 3}), x.f({3, 2}))),
      SMP_CALL(at::tensordot(x.f({2, 3, 4}), x.f({3, 4, 5}), {1, 2}, {0, 1})),
      SMP_CALL(at::einsum("bij,bjk->bik", {x.f({2, 3, 4}), x.f({2, 4, 5})})),
      SMP_CALL(at::einsum("bhqd,bhkd->bhqk", {x.f({2, 3, 4, 5}), x.f({2, 3, 6, 5})})),
      SMP_CALL(at::chain_matmul({x.f({2, 3}), x.f({3, 4}), x.f({4, 2})})),
      SMP_CALL(at::matrix_power(x.f({3, 3}), 3)),
      SMP_CALL(at::mm(x.f({0, 3}), x.f({3, 4}))),
      SMP_CALL(at::bmm(x.f({0, 3, 4}), x.f({0, 4, 5}))),
  };
}

std::vector<Call> linear_algebra_calls() {
  return {
      SMP_CALL(at::linalg_inv(x.spd(3))),
      SMP_CALL(at::linalg_det(x.spd(3))),
      SMP_CALL(at::linalg_slogdet(x.spd(3))),
      SMP_CALL(at::linalg_cholesky(x.spd(3))),
      SMP_CALL(older_cholesky(x.spd(3))),
      SMP_CALL(at::cholesky_inverse(x.spd(3))),
      SMP_CALL(at::cholesky_solve(x.f({3, 2}), x.spd(3))),
      SMP_CALL(at::linalg_qr(x.f({4, 3}))),
      SMP_CALL(at::linalg_svd(x.f({4, 3}), false)),
      SMP_CALL(at::linalg_svdvals(x.f({4, 3}))),
      SMP_CALL(at::linalg_eigh(x.spd(3))),
      SMP_CALL(at::linalg_eigvalsh(x.spd(3))),
      SMP_CALL(at::linalg_eig(x.spd(3))),
      SMP_CALL(at::linalg_eigvals(x.spd(3))),
      SMP_CALL(at::linalg_solve(x.spd(3), x.f({3, 2}))),
      SMP_CALL(at::linalg_solve_triangular(x.spd(3), x.f({3, 2}), true)),
      SMP_CALL(at::linalg_lu(x.spd(3))),
      SMP_CALL(at::linalg_lu_factor(x.spd(3))),
      SMP_CALL(at::linalg_matrix_exp(x.spd(3))),
      SMP_CALL(at::linalg_householder_product(x.f({4, 3}), x.f({3}))),
      SMP_CALL(at::linalg_norm(x.f({3, 4}))),
      SMP_CALL(at::linalg_vector_norm(x.f({3, 4}), 2, {1})),
      SMP_CALL(at::linalg_matrix_norm(x.f({3, 4}), "nuc")),
      SMP_CALL(at::linalg_pinv(x.f({4, 3}))),
      SMP_CALL(at::linalg_cross(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::linalg_ldl_factor(x.spd(3))),
      SMP_CALL(at::geqrf(x.f({4, 3}))),
      SMP_CALL(at::ormqr(x.f({4, 3}), x.f({3}), x.f({4, 2}))),
      SMP_CALL(at::triangular_solve(x.f({3, 2}), x.spd(3))),
      SMP_CALL(at::logdet(x.spd(3))),
  };
}

std::vector<Call> fourier_calls() {
  return {
      SMP_CALL(at::fft_fft(x.f({2, 8}))),
      SMP_CALL(at::fft_fft(x.c({2, 4, 8}), {}, 1)),
      SMP_CALL(at::fft_ifft(x.c({2, 8}))),
      SMP_CALL(at::fft_rfft(x.f({2, 9}))),
      SMP_CALL(at::fft_rfft(x.f({2, 3, 4, 5}), {}, 1)),
      SMP_CALL(at::fft_irfft(x.c({2, 5}))),
      SMP_CALL(at::fft_irfft(x.c({2, 5}), 9)),
      SMP_CALL(at::fft_fft2(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::fft_ifft2(x.c({2, 3, 4, 5}))),
      SMP_CALL(at::fft_rfft2(x.f({2, 3, 4, 5}))),
      SMP_CALL(at::fft_irfft2(x.c({2, 3, 4, 5}))),
      SMP_CALL(at::fft_fftn(x.c({2, 3, 4, 5}), {}, {{0, 2}})),
      SMP_CALL(at::fft_fftn(x.c({2, 3, 4, 5}), {}, {{1, 3}})),
      SMP_CALL(at::fft_fftn(x.c({2, 3, 4, 5}), {}, {{3, 1, 2}})),
      SMP_CALL(at::fft_rfftn(x.f({2, 3, 4, 5}), {}, {{3, 1}})),
      SMP_CALL(at::fft_irfftn(x.c({2, 3, 4, 5}), {}, {{1, 2, 3}})),
      SMP_CALL(at::fft_hfft(x.c({2, 5}))),
      SMP_CALL(at::fft_ihfft(x.f({2, 8}))),
      SMP_CALL(at::fft_fftshift(x.f({2, 8}))),
      SMP_CALL(at::stft(x.f({2, 64}), 16, {}, {}, x.f({16}).detach(), true, "reflect", false, {},
                        /*return_complex=*/true)),
  };
}

}  // namespace

std::vector<Call> reduction_calls() {
  auto calls = full_and_partial_calls();
  for (const auto& more : {product_calls(), linear_algebra_calls(), fourier_calls()}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  return calls;
}

}  // namespace smp::test
