// Everything happens on the rank's own thread: hooks of a CPU backward fire in the thread that called it.
#include "runtime/gradients/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "runtime/device/device.h"
#include "runtime/exchange/tags.h"
#include "runtime/libtorch/finite.h"
#include "runtime/libtorch/memory_tensor.h"
#include "runtime/libtorch/sole_owner.h"
#include "runtime/transport/abandoned.h"
#include "runtime/transport/shared_sum.h"

namespace smp::runtime {
namespace {

/// What sums over replicas are made of: a view of the gradient, or of its complex numbers as pairs.
at::Tensor reals(const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(gradient.layout() == at::kStrided,
                              "gradients: expected dense ones, which replicas can add up, got ", gradient.toString(), " ",
                              gradient.sizes(), ". Make dense ones (sparse=false of an embedding).");
  return gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
}

int64_t num_reals(const at::Tensor& parameter) { return parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(); }

/// Nobody else has the gradient or a part of its memory, and each element has its own.
bool is_all_its_own(const at::Tensor& gradient) {
  return owns_all_of_its_memory(gradient) && gradient.is_non_overlapping_and_dense() && !gradient.is_neg() &&
         !gradient.is_conj();
}

}  // namespace

GradientReducer::GradientReducer(std::vector<at::Tensor> parameters, Transport& replicas, ReducerOptions options)
    : parameters_(std::move(parameters)),
      replicas_(replicas),
      options_(std::move(options)),
      is_expected_(parameters_.size(), 0),
      is_ready_(parameters_.size(), 0) {
  const bool are_on_host = std::all_of(parameters_.begin(), parameters_.end(), is_on_host);
  options_.shares_memory = options_.shares_memory && are_on_host;
  if (!are_on_host && !options_.hook) lane_ = this_ranks_device().new_lane();  // a hook is of the program's order
  check_same_layout();
  make_buckets();
  if (options_.shares_memory && !options_.hook) share_memory();
  if (!options_.overlap) return;
  for (size_t i = 0; i < parameters_.size(); ++i) watch(i);
}

GradientReducer::~GradientReducer() {
  for (const auto& [node, key] : watched_) node->del_post_hook(key);
}

void GradientReducer::check_same_layout() const {
  std::ostringstream text;
  text << options_.bucket_bytes << (options_.hook ? " hook" : "") << (options_.shares_memory ? "" : " messages") << "\n";
  for (const at::Tensor& parameter : parameters_) text << parameter.scalar_type() << " " << parameter.sizes() << "\n";
  const std::vector<std::string> all = replicas_.all_gather(text.str());
  for (size_t r = 1; r < all.size(); ++r) {
    TORCH_CHECK_VALUE(all[r] == all[0],
                      "gradients: expected the same parameters with requires_grad, bucket size and communication hook on "
                      "all replicas, got others on replica ",
                      r, " than on 0. Freeze parameters and register hooks on every rank alike, before the first step.");
  }
}

void GradientReducer::make_buckets() {
  bucket_of_.resize(parameters_.size());
  int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters_) layouts_.push_back(layout_of(parameter));
  for (size_t i = parameters_.size(); i-- > 0;) {
    const auto own = static_cast<int64_t>(parameters_[i].nbytes());
    const bool fits = !buckets_.empty() && bytes + own <= options_.bucket_bytes &&
                      dtype(buckets_.back()) == c10::toRealValueType(parameters_[i].scalar_type());
    if (!fits) buckets_.emplace_back(), bytes = 0;
    buckets_.back().parameters.push_back(i);
    bucket_of_[i] = buckets_.size() - 1;
    bytes += own;
  }
}

void GradientReducer::share_memory() {
  int64_t most = 0;
  for (const Bucket& bucket : buckets_) {
    most = std::max(most, num_elements(bucket) * static_cast<int64_t>(c10::elementSize(dtype(bucket))));
  }
  if (most == 0 || replicas_.size() == 1) return;
  auto memory = SharedMemory::make(replicas_, most);
  if (memory) shared_ = std::make_unique<SharedSum>(replicas_, kFirstBucketTag + 2 * options_.number, std::move(memory));
}

bool GradientReducer::is_for(const std::vector<at::Tensor>& parameters) const {
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  const auto has_layout = [](const at::Tensor& a, const Layout& layout) { return layout_of(a) == layout; };
  return std::equal(parameters_.begin(), parameters_.end(), parameters.begin(), parameters.end(), is_same) &&
         std::equal(parameters.begin(), parameters.end(), layouts_.begin(), layouts_.end(), has_layout);
}

int64_t GradientReducer::shared_bytes() const { return shared_ ? shared_->num_bytes() : 0; }

void GradientReducer::watch(size_t parameter) {
  auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[parameter]);
  using torch::autograd::variable_list;
  const auto hook = [this, parameter](const variable_list& outputs, const variable_list&) -> variable_list {
    accumulated(parameter);
    return outputs;
  };
  const uintptr_t key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(hook));
  watched_.emplace_back(std::move(accumulator), key);
}

void GradientReducer::begin(int divisor) {
  divisor_ = divisor;
  is_armed_ = true;
  next_ = 0;
  sending_.reset();
  nonfinite_.clear();
  std::fill(is_expected_.begin(), is_expected_.end(), 0);
  std::fill(is_ready_.begin(), is_ready_.end(), 0);
  for (Bucket& bucket : buckets_) bucket.num_missing = bucket.parameters.size();
}

void GradientReducer::expect(const std::vector<size_t>& parameters) {
  for (const size_t i : parameters) is_expected_[i] = 1;
}

void GradientReducer::accumulated(size_t parameter) {
  if (!is_armed_) return;
  if (is_expected_[parameter]) mark_ready(parameter);
  advance();
}

void GradientReducer::add_ready(const std::vector<size_t>& parameters) {
  for (const size_t i : parameters) mark_ready(i);
  if (options_.overlap) advance();
}

void GradientReducer::mark_ready(size_t parameter) {
  if (is_ready_[parameter]) return;
  is_ready_[parameter] = 1;
  Bucket& bucket = buckets_[bucket_of_[parameter]];
  if (--bucket.num_missing == 0 && lane_) bucket.ready = this_ranks_device().record();
}

void GradientReducer::progress() {
  if (!sending_) return;
  const OnLane on_lane(lane_.get());
  is_summed();
}

void GradientReducer::advance() {
  const OnLane on_lane(lane_.get());
  move_on();
}

// One bucket under way at a time: its memory is that of one bucket and what the replicas send for it. It is not unpacked at
// once, even where the sum is there at once: the gradient that filled it is still held by whoever has made it.
void GradientReducer::move_on() {
  if (sending_) {
    if (!is_summed()) return;
    complete();
  }
  if (next_ == buckets_.size() || buckets_[next_].num_missing > 0) return;
  if (shared_ && !shared_->is_free()) return;
  launch();
  if (options_.hook) complete();
}

// A hook is waited for anyway.
bool GradientReducer::looks_at_once(const at::Tensor& flat) const { return is_on_host(flat) || options_.hook; }

bool GradientReducer::is_summed() {
  if (shared_) return shared_->advance();
  if (sending_->sum && !sending_->sum->advance()) return false;
  return is_on_host(sending_->flat) || tell_host().are_there();
}

const ToldNumbers& GradientReducer::tell_host() {
  Sending& sending = *sending_;
  if (!sending.told) {
    const at::NoGradGuard no_grad;
    const int64_t count = num_flags(buckets_[sending.bucket]);
    at::Tensor numbers = sending.flat.narrow(0, sending.flat.numel() - count, count).to(at::kFloat);
    if (sending.norms.defined()) numbers = at::cat({numbers, sending.norms});
    sending.told = std::make_unique<ToldNumbers>(numbers);
  }
  return *sending.told;
}

// As long as any message: what has come may be behind a transfer whose other rank is gone.
void GradientReducer::wait_until_told() {
  const ToldNumbers& told = tell_host();
  if (told.are_there()) return;
  replicas_.wait_until([&] { return told.are_there(); },
                       [](double seconds) { return CommError::Where{.operation = "gradients", .seconds = seconds}; });
}

void GradientReducer::launch() {
  const at::NoGradGuard no_grad;
  const Bucket& bucket = buckets_[next_];
  if (lane_) this_ranks_device().go_on_behind(bucket.ready);
  Sending& sending = sending_.emplace(Sending{.bucket = next_, .flat = new_flat(bucket), .sum = {}});
  pack(bucket, sending.flat);
  if (options_.looks_for_nonfinite && !looks_at_once(sending.flat)) sending.norms = norms(bucket);
  ++next_;
  if (options_.hook) return;
  auto owner = std::make_shared<at::Tensor>(sending.flat);
  const auto divide = [owner, end = sending.flat.numel() - num_flags(bucket), divisor = divisor_](int64_t first,
                                                                                                  int64_t count) {
    const int64_t num_gradients = std::min(first + count, end) - first;
    if (num_gradients > 0) owner->narrow(0, first, num_gradients).div_(divisor);
  };
  if (shared_) {
    shared_->start(sending.flat.numel(), sending.flat.scalar_type(), divide);
    return;
  }
  // The storage is what the messages read and write, whatever happens to the tensor.
  constexpr int64_t kMaxPartBytes = int64_t{1} << 30;
  const bool is_too_large = static_cast<int64_t>(sending.flat.nbytes()) / replicas_.size() >= kMaxPartBytes;
  if (is_too_large) {
    keeping(owner, [&] { replicas_.all_reduce_sum(memory_of(sending.flat), sending.flat.scalar_type()); });
    return;
  }
  sending.sum.emplace(replicas_, kFirstBucketTag + 2 * options_.number, memory_of(sending.flat), owner,
                      sending.flat.scalar_type(), divide);
}

int64_t GradientReducer::num_flags(const Bucket& bucket) { return static_cast<int64_t>(bucket.parameters.size()); }

c10::ScalarType GradientReducer::dtype(const Bucket& bucket) const {
  return c10::toRealValueType(parameters_[bucket.parameters.front()].scalar_type());
}

int64_t GradientReducer::num_elements(const Bucket& bucket) const {
  int64_t num_elements = num_flags(bucket);
  for (const size_t i : bucket.parameters) num_elements += num_reals(parameters_[i]);
  return num_elements;
}

at::Tensor GradientReducer::new_flat(const Bucket& bucket) const {
  if (shared_) return tensor_on(host(), shared_->own(), {num_elements(bucket)}, {1}, dtype(bucket), /*holder=*/nullptr);
  const auto options = parameters_[bucket.parameters.front()].options().dtype(dtype(bucket)).requires_grad(false);
  return at::empty({num_elements(bucket)}, options);
}

void GradientReducer::pack(const Bucket& bucket, at::Tensor& flat) {
  at::Tensor flags = flat.narrow(0, flat.numel() - num_flags(bucket), num_flags(bucket)).fill_(1);
  const Device& device = device_holding(flat);
  auto* const begin = static_cast<char*>(memory_of(flat).data);
  char* next = begin;
  for (size_t k = 0; k < bucket.parameters.size(); ++k) {
    const size_t i = bucket.parameters[k];
    const at::Tensor& parameter = parameters_[i];
    const at::Tensor& gradient = parameter.grad();
    if (!gradient.defined()) flags.select(0, static_cast<int64_t>(k)).zero_();
    const bool is_plain = gradient.defined() && gradient.layout() == at::kStrided &&
                          gradient.scalar_type() == parameter.scalar_type() && gradient.is_contiguous() &&
                          !gradient.is_neg() && !gradient.is_conj();
    if (is_plain) {
      device.copy(next, data_of(gradient), static_cast<int64_t>(gradient.nbytes()));  // there are small ones by the hundred
    } else {
      const int64_t offset = (next - begin) / flat.element_size();
      at::Tensor part = flat.narrow(0, offset, num_reals(parameter));
      gradient.defined() ? part.copy_(reals(gradient).reshape({-1})) : part.zero_();
    }
    if (options_.looks_for_nonfinite && looks_at_once(flat) && !is_finite(gradient)) nonfinite_.push_back(i);
    next += num_reals(parameter) * flat.element_size();
  }
}

at::Tensor GradientReducer::norms(const Bucket& bucket) const {
  std::vector<at::Tensor> gradients;
  for (const size_t i : bucket.parameters) {
    if (parameters_[i].grad().defined()) gradients.push_back(parameters_[i].grad());
  }
  return gradients.empty() ? at::Tensor() : norms_of(gradients);
}

// The gradients are still this replica's own.
at::Tensor GradientReducer::told_flags(const Sending& done) {
  float* const flags = done.told->data();
  const Bucket& bucket = buckets_[done.bucket];
  const float* norm = flags + num_flags(bucket);
  for (const size_t i : bucket.parameters) {
    const at::Tensor& gradient = parameters_[i].grad();
    if (!done.norms.defined() || !gradient.defined()) continue;
    TORCH_INTERNAL_ASSERT(norm < flags + num_flags(bucket) + done.norms.numel(),
                          "a gradient came while its bucket was away");
    if (!std::isfinite(*norm++) && !is_finite(gradient)) nonfinite_.push_back(i);
  }
  return tensor_on(host(), flags, {num_flags(bucket)}, {1}, at::kFloat, /*holder=*/nullptr);
}

void GradientReducer::complete() {
  const at::NoGradGuard no_grad;
  const Sending done = std::move(*sending_);
  sending_.reset();
  const Bucket& bucket = buckets_[done.bucket];
  const auto element_bytes = static_cast<int64_t>(done.flat.element_size());
  const int64_t num_gradients = done.flat.numel() - num_flags(bucket);
  if (shared_) {
    Means means;
    means.read = [&](int64_t first, const at::Tensor& to) { shared_->read(first * element_bytes, memory_of(to)); };
    means.part = [&](int64_t first, int64_t count) {
      at::Tensor part = at::empty({count}, done.flat.options());
      means.read(first, part);
      return part;
    };
    unpack(bucket, means, means.part(num_gradients, num_flags(bucket)));
    shared_->release();
    return;
  }
  at::Tensor gradients = done.flat.narrow(0, 0, num_gradients),
             flags = done.flat.narrow(0, num_gradients, num_flags(bucket));
  if (options_.hook) {
    gradients = hooked(gradients, done.bucket);
    if (!gradients.is_contiguous() || gradients.is_neg()) gradients = gradients.clone(at::MemoryFormat::Contiguous);
    flags = flags.clone();
    keeping(std::make_shared<at::Tensor>(flags), [&] { replicas_.all_reduce_sum(memory_of(flags), flags.scalar_type()); });
  } else if (!done.sum) {  // else each replica has divided its part
    gradients.div_(divisor_);
  }
  if (done.told) flags = told_flags(done);
  const auto* data = static_cast<const char*>(data_of(gradients));
  const Means means{.read =
                        [&](int64_t first, const at::Tensor& to) {
                          const DeviceMemory memory = memory_of(to);
                          device_holding(to).copy(memory.data, data + first * element_bytes, memory.num_bytes);
                        },
                    .part = [&](int64_t first, int64_t count) { return gradients.narrow(0, first, count); }};
  const JoinAtEnd behind(lane_.get());
  unpack(bucket, means, flags);
}

at::Tensor GradientReducer::hooked(const at::Tensor& gradients, size_t bucket) const {
  const at::Tensor own = gradients.clone();
  at::Tensor reduced = options_.hook(own, static_cast<int64_t>(bucket), bucket + 1 == buckets_.size());
  TORCH_CHECK_VALUE(reduced.defined() && reduced.device() == gradients.device() &&
                        reduced.sizes().equals(gradients.sizes()) && reduced.scalar_type() == gradients.scalar_type(),
                    "communication hook: expected a tensor like the bucket, ", gradients.toString(), " ", gradients.sizes(),
                    ", got ", reduced.defined() ? reduced.toString() : "an undefined one", " ",
                    reduced.defined() ? reduced.sizes() : at::IntArrayRef(), ". Return the reduced bucket.");
  return reduced;
}

void GradientReducer::unpack(const Bucket& bucket, const Means& means, const at::Tensor& flags) {
  const at::Tensor on_host = flags.to(host().type, at::kDouble);
  const auto* num_replicas = static_cast<const double*>(data_of(on_host));
  int64_t offset = 0;
  for (size_t k = 0; k < bucket.parameters.size(); ++k) {
    at::Tensor& parameter = parameters_[bucket.parameters[k]];
    const bool is_anywhere = num_replicas[k] > 0;
    if (is_anywhere) unpack(parameter, dtype(bucket), means, offset);
    offset += num_reals(parameter);
  }
}

// Into a new tensor where somebody else has the old one, or the rest of the backward still reads its memory.
// (partitioner/memory/leaving_gradients.h counts a new one always.)
void GradientReducer::unpack(at::Tensor& parameter, c10::ScalarType type, const Means& means, int64_t offset) {
  const at::Tensor& own = parameter.grad();
  const bool stays = shared_ && !is_armed_ && is_all_its_own(own);
  at::Tensor mean = stays ? own : at::empty_like(own.defined() ? own : parameter.detach());
  if (lane_) lane_->share(mean.storage());
  if (mean.is_contiguous() && c10::toRealValueType(mean.scalar_type()) == type) {
    if (mean.numel() > 0) means.read(offset, mean);
  } else {
    at::Tensor numbers = reals(mean);
    numbers.copy_(means.part(offset, num_reals(mean)).view(numbers.sizes()));
  }
  parameter.mutable_grad() = std::move(mean);
}

void GradientReducer::finish() {
  is_armed_ = false;
  for (size_t i = 0; i < parameters_.size(); ++i) mark_ready(i);
  const OnLane on_lane(lane_.get());
  while (sending_ || next_ < buckets_.size()) {
    if (shared_) sending_ ? shared_->wait("gradients") : shared_->wait_until_free("gradients");
    if (sending_ && sending_->sum) sending_->sum->wait("gradients");
    if (sending_ && !shared_ && !is_on_host(sending_->flat)) wait_until_told();
    move_on();
  }
  if (shared_) shared_->wait_until_free("gradients");  // messages do not outlive the step, as the transport need not
}

}  // namespace smp::runtime
