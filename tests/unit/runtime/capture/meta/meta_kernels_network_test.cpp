// Network calls of the meta sweep: convolutions, pools, norms, attention, recurrent cells, embeddings.
#include "tests/unit/runtime/capture/meta/meta_kernels_test.h"

namespace smp::test {
namespace {

/// Weights of a one-layer recurrent network on inputs of width 3 with `gates` times 4 rows.
std::vector<Tensor> recurrent_weights(const Inputs& x, int64_t gates) {
  return {x.f({4 * gates, 3}), x.f({4 * gates, 4}), x.f({4 * gates}), x.f({4 * gates})};
}

std::vector<Call> convolution_calls() {
  return {
      SMP_CALL(at::conv1d(x.f({2, 3, 9}), x.f({4, 3, 3}), x.f({4}))),
      SMP_CALL(at::conv1d(x.f({2, 4, 9}), x.f({4, 1, 3}), {}, 2, 1, 2, 4)),
      SMP_CALL(at::conv1d(x.f({3, 9}), x.f({4, 3, 3}))),
      SMP_CALL(at::conv2d(x.f({2, 3, 8, 9}), x.f({4, 3, 3, 3}), x.f({4}))),
      SMP_CALL(at::conv2d(x.f({1, 3, 8, 9}), x.f({4, 3, 3, 3}))),
      SMP_CALL(at::conv2d(x.f({3, 8, 9}), x.f({4, 3, 3, 3}))),
      SMP_CALL(at::conv2d(x.f({2, 3, 8, 9}), x.f({4, 3, 1, 1}))),
      SMP_CALL(at::conv2d(x.f({2, 4, 8, 9}), x.f({4, 1, 3, 3}), x.f({4}), 1, 1, 1, 4)),
      SMP_CALL(at::conv2d(x.f({2, 4, 8, 9}), x.f({6, 2, 3, 3}), {}, 2, 1, 2, 2)),
      SMP_CALL(at::conv2d(x.f({2, 3, 8, 9}), x.f({4, 3, 3, 3}), {}, 1, "same")),
      SMP_CALL(at::conv2d(x.f({0, 3, 8, 9}), x.f({4, 3, 3, 3}))),
      SMP_CALL(at::conv2d(x.f({2, 3, 16, 16}), x.f({8, 3, 4, 4}), x.f({8}), 4).flatten(2).transpose(1, 2)),
      SMP_CALL(at::conv3d(x.f({2, 3, 4, 5, 6}), x.f({4, 3, 2, 2, 2}), x.f({4}))),
      SMP_CALL(at::conv3d(x.f({1, 3, 4, 5, 6}), x.f({4, 3, 2, 2, 2}))),
      SMP_CALL(at::conv3d(x.f({2, 4, 4, 5, 6}), x.f({4, 2, 2, 2, 2}), {}, 2, 1, 1, 2)),
      SMP_CALL(at::conv3d(x.f({1, 3, 6, 7, 8}), x.f({4, 3, 2, 2, 2}), {}, {1, 1, 1}, {0, 0, 0}, {2, 2, 2})),
      SMP_CALL(at::conv_transpose1d(x.f({2, 3, 9}), x.f({3, 4, 3}))),
      SMP_CALL(at::conv_transpose2d(x.f({2, 3, 8, 9}), x.f({3, 4, 3, 3}), x.f({4}))),
      SMP_CALL(at::conv_transpose2d(x.f({2, 4, 8, 9}), x.f({4, 3, 3, 3}), {}, 2, 1, 1, 2)),
      SMP_CALL(at::conv_transpose2d(x.f({2, 4, 8, 9}), x.f({4, 1, 3, 3}), {}, 2, 1, 1, 4)),
      SMP_CALL(at::conv_transpose2d(x.f({2, 4, 8, 9}), x.f({4, 3, 3, 3}), {}, 1, 0, 0, 1, 2)),
      SMP_CALL(at::conv_transpose3d(x.f({2, 3, 4, 5, 6}), x.f({3, 4, 2, 2, 2}))),
      SMP_CALL(at::conv_transpose3d(x.f({1, 3, 4, 5, 6}), x.f({3, 4, 2, 2, 2}))),
      SMP_CALL(at::conv2d(x.f({1, 4, 8, 9}), x.f({4, 1, 3, 3}), {}, 1, 1, 2, 4)),
      SMP_CALL(at::conv2d(x.f({1, 3, 8, 9}), x.f({4, 3, 2, 2}), {}, 1, at::IntArrayRef{0, 0}, 2)),
      SMP_CALL(at::conv2d(x.f({1, 1, 8, 9}), x.f({4, 1, 3, 3}))),
      SMP_CALL(at::conv2d(x.f({2, 3, 1, 1}), x.f({4, 3, 1, 1}))),
      SMP_CALL(at::conv2d(x.f({2, 3, 8, 9}).contiguous(), x.f({4, 3, 3, 3}))),
      SMP_CALL(at::conv2d(x.f({2, 3, 8, 9}), x.f({4, 3, 3, 3}).contiguous())),
      SMP_CALL(at::conv3d(x.f({1, 3, 5, 5, 5}), x.f({4, 3, 4, 4, 4}))),
      SMP_CALL(at::conv3d(x.f({1, 3, 5, 5, 5}), x.f({4, 3, 1, 1, 1}))),
      SMP_CALL(at::conv3d(x.f({2, 3, 5, 5, 5}), x.f({4, 3, 1, 1, 1}))),
      SMP_CALL(at::conv3d(x.f({1, 4, 5, 5, 5}), x.f({4, 1, 3, 3, 3}), {}, {1, 1, 1}, {0, 0, 0}, {1, 1, 1}, 4)),
      SMP_CALL(at::conv3d(x.f({1, 3, 9, 50, 50}), x.f({2, 3, 2, 2, 2}))),
      SMP_CALL(at::conv_transpose3d(x.f({2, 4, 4, 5, 6}), x.f({4, 1, 2, 2, 2}), {}, 2, 0, 0, 4)),
      SMP_CALL(at::conv_transpose3d(x.f({1, 4, 4, 5, 6}), x.f({4, 1, 2, 2, 2}), {}, 1, 0, 0, 4)),
      SMP_CALL(at::conv_transpose3d(x.f({1, 4, 4, 5, 6}), x.f({4, 2, 2, 2, 2}), {}, 1, 0, 0, 2)),
      SMP_CALL(at::conv_transpose3d(x.f({2, 4, 4, 5, 6}), x.f({4, 2, 2, 2, 2}), {}, 2, 0, 1, 2)),
      SMP_CALL(at::conv_transpose1d(x.f({2, 4, 9}), x.f({4, 2, 3}), {}, 2, 1, 1, 2)),
      SMP_CALL(at::conv_tbc(x.f({9, 2, 3}), x.f({3, 3, 4}), x.f({4}))),
      SMP_CALL(at::im2col(x.f({2, 3, 8, 9}), {2, 3}, {1, 1}, {0, 1}, {1, 2})),
      SMP_CALL(at::im2col(x.f({3, 8, 9}), {2, 2}, {2, 2}, {1, 1}, {2, 2})),
      SMP_CALL(at::col2im(x.f({2, 12, 12}), {4, 5}, {2, 2}, {1, 1}, {0, 0}, {1, 1})),
      SMP_CALL(at::col2im(x.f({12, 12}), {4, 5}, {2, 2}, {1, 1}, {0, 0}, {1, 1})),
  };
}

std::vector<Call> pool_calls() {
  return {
      SMP_CALL(at::max_pool1d(x.f({2, 3, 9}), 2)),
      SMP_CALL(at::max_pool2d(x.f({2, 3, 8, 9}), 2)),
      SMP_CALL(at::max_pool2d(x.f({2, 3, 8, 9}), 3, 2, 1, 1, true)),
      SMP_CALL(at::max_pool2d_with_indices(x.f({2, 3, 8, 9}), 2)),
      SMP_CALL(at::max_pool3d(x.f({2, 3, 4, 5, 6}), 2)),
      SMP_CALL(at::max_pool3d(x.f({3, 4, 5, 6}), 2)),
      SMP_CALL(at::max_pool3d_with_indices(x.f({2, 3, 4, 5, 6}), {2, 3, 2}, {1, 2, 1}, 1, 1, true)),
      SMP_CALL(at::avg_pool1d(x.f({2, 3, 9}), 2)),
      SMP_CALL(at::avg_pool2d(x.f({2, 3, 8, 9}), 2)),
      SMP_CALL(at::avg_pool3d(x.f({2, 3, 4, 5, 6}), 2)),
      SMP_CALL(at::adaptive_avg_pool1d(x.f({2, 3, 9}), 2)),
      SMP_CALL(at::adaptive_avg_pool2d(x.f({2, 3, 8, 9}), {2, 3})),
      SMP_CALL(at::adaptive_avg_pool2d(x.f({2, 3, 8, 9}), {1, 1})),
      SMP_CALL(at::adaptive_avg_pool2d(x.f({3, 8, 9}), {2, 3})),
      SMP_CALL(at::adaptive_avg_pool3d(x.f({2, 3, 4, 5, 6}), {2, 2, 3})),
      SMP_CALL(at::adaptive_avg_pool3d(x.f({2, 3, 4, 5, 6}), {1, 1, 1})),
      SMP_CALL(at::adaptive_max_pool1d(x.f({2, 3, 9}), 2)),
      SMP_CALL(at::adaptive_max_pool2d(x.f({2, 3, 8, 9}), {2, 2})),
      SMP_CALL(at::adaptive_max_pool3d(x.f({2, 3, 4, 5, 6}), {2, 2, 2})),
      SMP_CALL(at::fractional_max_pool2d(x.f({2, 3, 8, 9}), {2, 2}, {4, 4}, x.f({2, 3, 2}).detach())),
      SMP_CALL(at::fractional_max_pool3d(x.f({2, 3, 6, 6, 6}), {2, 2, 2}, {3, 3, 3}, x.f({2, 3, 3}).detach())),
      SMP_CALL(at::max_unpool2d(x.f({2, 3, 2, 2}), x.i({2, 3, 2, 2}), {4, 4})),
      SMP_CALL(at::max_unpool3d(x.f({2, 3, 2, 2, 2}), x.i({2, 3, 2, 2, 2}), {4, 4, 4}, {2, 2, 2}, {0, 0, 0})),
      SMP_CALL(at::upsample_nearest2d(x.f({2, 3, 4, 5}), {8, 10})),
      SMP_CALL(at::upsample_bilinear2d(x.f({2, 3, 4, 5}), {8, 10}, false)),
      SMP_CALL(at::upsample_bicubic2d(x.f({2, 3, 4, 5}), {8, 10}, false)),
      SMP_CALL(at::upsample_linear1d(x.f({2, 3, 4}), {8}, false)),
      SMP_CALL(at::upsample_trilinear3d(x.f({2, 3, 4, 5, 6}), {8, 10, 12}, false)),
      SMP_CALL(at::pixel_shuffle(x.f({2, 4, 3, 3}), 2)),
      SMP_CALL(at::pixel_unshuffle(x.f({2, 3, 4, 6}), 2)),
      SMP_CALL(at::channel_shuffle(x.f({2, 4, 3, 5}), 2)),
      SMP_CALL(at::reflection_pad1d(x.f({2, 3, 9}), {1, 2})),
      SMP_CALL(at::reflection_pad2d(x.f({2, 3, 8, 9}), {1, 2, 3, 1})),
      SMP_CALL(at::reflection_pad2d(x.f({3, 8, 9}), {1, 2, 3, 1})),
      SMP_CALL(at::reflection_pad3d(x.f({2, 3, 4, 5, 6}), {1, 1, 1, 1, 1, 1})),
      SMP_CALL(at::replication_pad2d(x.f({2, 3, 8, 9}), {1, 1, 1, 1})),
      SMP_CALL(at::pad(x.f({2, 3, 8, 9}), {1, 1, 2, 2}, "circular")),
      SMP_CALL(at::constant_pad_nd(x.f({2, 3, 8, 9}), {1, 1, 2, 2}, 0)),
      SMP_CALL(at::grid_sampler(x.f({2, 3, 8, 9}), x.f({2, 4, 5, 2}), 0, 0, false)),
      SMP_CALL(at::grid_sampler(x.f({2, 3, 4, 5, 6}), x.f({2, 4, 5, 3, 3}), 0, 0, false)),
      SMP_CALL(at::affine_grid_generator(x.f({2, 2, 3}), {2, 3, 4, 5}, false)),
  };
}

std::vector<Call> norm_calls() {
  return {
      SMP_CALL(at::batch_norm(x.f({2, 3, 4, 5}), x.f({3}), x.f({3}), x.f({3}).detach(), x.f({3}).detach(), true, 0.1, 1e-5,
                              false)),
      SMP_CALL(at::batch_norm(x.f({2, 3, 4, 5}), x.f({3}), x.f({3}), x.f({3}).detach(), x.f({3}).detach(), false, 0.1, 1e-5,
                              false)),
      SMP_CALL(at::batch_norm(x.f({6, 3}), {}, {}, {}, {}, true, 0.1, 1e-5, false)),
      SMP_CALL(at::batch_norm(x.f({2, 3, 4, 5, 6}), {}, {}, {}, {}, true, 0.1, 1e-5, false)),
      SMP_CALL(at::native_batch_norm(x.f({2, 3, 4, 5}), x.f({3}), x.f({3}), {}, {}, true, 0.1, 1e-5)),
      SMP_CALL(at::native_batch_norm(x.f({2, 3, 9}), {}, {}, x.f({3}).detach(), x.f({3}).detach(), false, 0.1, 1e-5)),
      SMP_CALL(at::_native_batch_norm_legit(x.f({2, 3, 9}), {}, {}, true, 0.1, 1e-5)),
      SMP_CALL(at::native_batch_norm(x.f({2, 3, 4, 5}).to(at::kBFloat16), x.f({3}), x.f({3}), {}, {}, true, 0.1, 1e-5)),
      SMP_CALL(at::native_batch_norm(x.f({2, 3, 4, 5}).to(at::kHalf), x.f({3}), x.f({3}), x.f({3}).detach(),
                                     x.f({3}).detach(), false, 0.1, 1e-5)),
      SMP_CALL(at::native_layer_norm(x.f({2, 3, 4}).to(at::kBFloat16), {4}, x.f({4}), x.f({4}), 1e-5)),
      SMP_CALL(at::native_layer_norm(x.f({2, 3, 4}).to(at::kBFloat16), {4}, {}, {}, 1e-5)),
      SMP_CALL(at::native_group_norm(x.f({2, 4, 4, 5}).to(at::kBFloat16), x.f({4}), x.f({4}), 2, 4, 20, 2, 1e-5)),
      SMP_CALL(at::instance_norm(x.f({2, 3, 4, 5}), x.f({3}), x.f({3}), {}, {}, true, 0.1, 1e-5, false)),
      SMP_CALL(at::layer_norm(x.f({2, 3, 4}), {4}, x.f({4}), x.f({4}))),
      SMP_CALL(at::layer_norm(x.f({2, 3, 4, 5}), {4, 5})),
      SMP_CALL(at::native_layer_norm(x.f({2, 3, 4, 5}), {5}, x.f({5}), x.f({5}), 1e-5)),
      SMP_CALL(at::native_layer_norm(x.f({0, 4}), {4}, x.f({4}), x.f({4}), 1e-5)),
      SMP_CALL(at::layer_norm(x.f({2, 3, 4, 5}).permute({0, 2, 3, 1}), {3}).permute({0, 3, 1, 2})),
      SMP_CALL(at::group_norm(x.f({2, 4, 4, 5}), 2, x.f({4}), x.f({4}))),
      SMP_CALL(at::group_norm(x.f({2, 4}), 2)),
      SMP_CALL(at::native_group_norm(x.f({2, 4, 4, 5}), {}, {}, 2, 4, 20, 2, 1e-5)),
      SMP_CALL(at::rms_norm(x.f({2, 3, 4}), {4}, x.f({4}))),
      SMP_CALL(at::_weight_norm(x.f({4, 3, 2}), x.f({4, 1, 1}), 0)),
      SMP_CALL(at::_weight_norm_interface(x.f({4, 3, 2}), x.f({1, 1, 2}), 2)),
      SMP_CALL(at::renorm(x.f({3, 4}), 2, 0, 1)),
      SMP_CALL(at::norm(x.f({3, 4}))),
  };
}

std::vector<Call> sequence_calls() {
  return {
      SMP_CALL(at::embedding(x.f({10, 4}), x.i({2, 3}))),
      SMP_CALL(at::embedding(x.f({10, 4}), x.i({2, 3}), 0)),
      SMP_CALL(at::embedding(x.f({10, 4}), x.i({0}))),
      SMP_CALL(at::embedding_bag(x.f({10, 4}), x.i({6}), x.i({2}).zero_())),
      SMP_CALL(at::embedding_bag(x.f({10, 4}), x.i({6}), x.i({2}).zero_(), false, 1)),
      SMP_CALL(at::embedding_bag(x.f({10, 4}), x.i({6}), x.i({2}).zero_(), false, 2)),
      SMP_CALL(at::embedding_bag(x.f({10, 4}), x.i({6}), x.i({2}).zero_(), false, 0, false, x.f({6}))),
      SMP_CALL(at::_embedding_bag(x.f({10, 4}), x.i({6}), x.i({3}).zero_(), false, 0, false, {}, true)),
      SMP_CALL(at::_embedding_bag(x.f({10, 4}), x.i({6}), x.i({3}).zero_(), false, 0, false, {}, false, 1)),
      SMP_CALL(at::_embedding_bag_forward_only(x.f({10, 4}), x.i({6}), x.i({2}).zero_())),
      SMP_CALL(at::_embedding_bag_forward_only(x.f({10, 4}), x.i({6}), x.i({2}).zero_(), false, 1)),
      SMP_CALL(at::linear(x.f({2, 3, 4}), x.f({5, 4}), x.f({5}))),
      SMP_CALL(at::linear(x.f({3, 4}), x.f({5, 4}))),
      SMP_CALL(at::bilinear(x.f({2, 3}), x.f({2, 4}), x.f({5, 3, 4}), x.f({5}))),
      SMP_CALL(at::lstm(x.f({5, 2, 3}), {x.f({1, 2, 4}), x.f({1, 2, 4})}, recurrent_weights(x, 4), true, 1, 0.0, true, false,
                        false)),
      SMP_CALL(at::gru(x.f({5, 2, 3}), x.f({1, 2, 4}), recurrent_weights(x, 3), true, 1, 0.0, true, false, false)),
      SMP_CALL(at::rnn_tanh(x.f({5, 2, 3}), x.f({1, 2, 4}), recurrent_weights(x, 1), true, 1, 0.0, true, false, false)),
      SMP_CALL(at::rnn_relu(x.f({2, 5, 3}), x.f({1, 2, 4}), recurrent_weights(x, 1), true, 1, 0.0, true, false, true)),
      SMP_CALL(at::lstm_cell(x.f({2, 3}), {x.f({2, 4}), x.f({2, 4})}, x.f({16, 3}), x.f({16, 4}), x.f({16}), x.f({16}))),
      SMP_CALL(at::gru_cell(x.f({2, 3}), x.f({2, 4}), x.f({12, 3}), x.f({12, 4}), x.f({12}), x.f({12}))),
      SMP_CALL(at::_transform_bias_rescale_qkv(x.f({2, 3, 12}), x.f({12}), 2)),
      SMP_CALL(at::_native_multi_head_attention(x.f({2, 3, 4}), x.f({2, 3, 4}), x.f({2, 3, 4}), 4, 2, x.f({12, 4}),
                                                x.f({12}), x.f({4, 4}), x.f({4}))),
      SMP_CALL(at::_transformer_encoder_layer_fwd(x.f({2, 3, 4}), 4, 2, x.f({12, 4}), x.f({12}), x.f({4, 4}), x.f({4}),
                                                  false, false, 1e-5, x.f({4}), x.f({4}), x.f({4}), x.f({4}), x.f({8, 4}),
                                                  x.f({8}), x.f({4, 8}), x.f({4}))),
      SMP_CALL(at::_scaled_dot_product_flash_attention_for_cpu(x.f({2, 3, 5, 4}), x.f({2, 3, 5, 4}), x.f({2, 3, 5, 4}))),
      SMP_CALL(at::triu(at::full({4, 4}, -1.0, x.options()), 1)),
  };
}

}  // namespace

std::vector<Call> network_calls() {
  auto calls = convolution_calls();
  for (const auto& more : {pool_calls(), norm_calls(), sequence_calls()}) {
    calls.insert(calls.end(), more.begin(), more.end());
  }
  return calls;
}

std::vector<Call> loss_calls() {
  return {
      SMP_CALL(at::mse_loss(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::mse_loss(x.f({2, 3, 4, 5}), x.f({2, 3, 4, 5}), at::Reduction::None)),
      SMP_CALL(at::l1_loss(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::smooth_l1_loss(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::huber_loss(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::huber_loss(x.f({2, 3, 4, 5}), x.f({2, 3, 4, 5}), at::Reduction::None)),
      SMP_CALL(at::huber_loss(x.f({2, 3}), x.f({3}), at::Reduction::Sum)),
      SMP_CALL(at::kl_div(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::nll_loss(x.f({4, 3}), x.i({4}))),
      SMP_CALL(at::nll_loss(x.f({4, 3}), x.i({4}), x.f({3}).detach(), at::Reduction::None)),
      SMP_CALL(at::nll_loss2d(x.f({2, 3, 4, 5}), x.i({2, 4, 5}))),
      SMP_CALL(at::nll_loss2d(x.f({2, 3, 4, 5}), x.i({2, 4, 5}), {}, at::Reduction::None)),
      SMP_CALL(at::cross_entropy_loss(x.f({4, 3}), x.i({4}))),
      SMP_CALL(at::cross_entropy_loss(x.f({2, 3, 4, 5}), x.i({2, 4, 5}))),
      SMP_CALL(at::cross_entropy_loss(x.f({2, 3, 7}), x.i({2, 7}), {}, at::Reduction::Sum)),
      SMP_CALL(at::cross_entropy_loss(x.f({4, 3}), x.i({4}), {}, at::Reduction::Mean, -100, 0.1)),
      SMP_CALL(at::cross_entropy_loss(x.f({4, 3}), x.f({4, 3}))),
      SMP_CALL(at::binary_cross_entropy(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::binary_cross_entropy(x.f({2, 3, 4, 5}), x.f({2, 3, 4, 5}), {}, at::Reduction::None)),
      SMP_CALL(at::binary_cross_entropy_with_logits(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::poisson_nll_loss(x.f({2, 3}), x.f({2, 3}), true, false, 1e-8, at::Reduction::Mean)),
      SMP_CALL(at::hinge_embedding_loss(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::cosine_embedding_loss(x.f({2, 3}), x.f({2, 3}), x.f({2}))),
      SMP_CALL(at::margin_ranking_loss(x.f({3}), x.f({3}), x.f({3}))),
      SMP_CALL(at::triplet_margin_loss(x.f({2, 3}), x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::soft_margin_loss(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::multi_margin_loss(x.f({2, 3}), x.i({2}))),
      SMP_CALL(at::multi_margin_loss(x.f({2, 3}), x.i({2}), 1, 1, {}, at::Reduction::None)),
      SMP_CALL(at::multilabel_margin_loss(x.f({2, 3}), x.i({2, 3}))),
      SMP_CALL(at::pairwise_distance(x.f({2, 3}), x.f({2, 3}))),
      SMP_CALL(at::cdist(x.f({2, 5, 3}), x.f({2, 4, 3}))),
      SMP_CALL(at::cdist(x.f({5, 3}), x.f({2, 4, 3}), 1)),
      SMP_CALL(at::pdist(x.f({4, 3}))),
  };
}

}  // namespace smp::test
