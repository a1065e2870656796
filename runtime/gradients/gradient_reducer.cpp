// Everything happens on the rank's own thread: hooks of a CPU backward fire in the thread that called it.
#include "runtime/gradients/gradient_reducer.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <sstream>

#include "runtime/exchange/tags.h"

namespace smp::runtime {

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
  sum_ = new_sum();
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
  for (const at::Tensor& parameter : parameters_) layouts_.push_back(layout_of(parameter));
  for (size_t i = parameters_.size(); i-- > 0;) {
    if (buckets_.empty() || !buckets_.back().memory.has_room_for(parameters_[i], options_.bucket_bytes)) {
      buckets_.push_back({.memory = {options_.looks_for_nonfinite ? &nonfinite_ : nullptr, lane_.get()}});
    }
    buckets_.back().memory.add(i, parameters_[i]);
    bucket_of_[i] = buckets_.size() - 1;
  }
}

std::unique_ptr<BucketSum> GradientReducer::new_sum() {
  const int tag = kFirstBucketTag + 2 * options_.number;
  const auto hook = [this](const at::Tensor& gradients) {
    return options_.hook(gradients, static_cast<int64_t>(next_), next_ + 1 == buckets_.size());
  };
  if (options_.hook) return sum_by_hook(replicas_, hook);
  std::unique_ptr<BucketSum> shared;
  if (options_.shares_memory && !buckets_.empty() && replicas_.size() > 1) {
    int64_t most_bytes = 0;
    for (const Bucket& bucket : buckets_) most_bytes = std::max(most_bytes, bucket.memory.num_bytes());
    shared = sum_in_shared_memory(replicas_, tag, most_bytes);
  }
  return shared ? std::move(shared) : sum_by_messages(replicas_, tag);
}

bool GradientReducer::is_for(const std::vector<at::Tensor>& parameters) const {
  const auto is_same = [](const at::Tensor& a, const at::Tensor& b) { return a.is_same(b); };
  const auto has_layout = [](const at::Tensor& a, const Layout& layout) { return layout_of(a) == layout; };
  return std::equal(parameters_.begin(), parameters_.end(), parameters.begin(), parameters.end(), is_same) &&
         std::equal(parameters.begin(), parameters.end(), layouts_.begin(), layouts_.end(), has_layout);
}

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
  backward_ = Backward::kGoesOn;
  next_ = 0;
  is_under_way_ = false;
  nonfinite_.clear();
  std::fill(is_expected_.begin(), is_expected_.end(), 0);
  std::fill(is_ready_.begin(), is_ready_.end(), 0);
  for (Bucket& bucket : buckets_) bucket.num_missing = bucket.memory.num_flags();
}

void GradientReducer::expect(const std::vector<size_t>& parameters) {
  for (const size_t i : parameters) is_expected_[i] = 1;
}

void GradientReducer::accumulated(size_t parameter) {
  if (backward_ == Backward::kIsOver) return;
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
  if (!is_under_way_) return;
  const OnLane on_lane(lane_.get());
  sum_->advance();
}

// One bucket under way at a time: its memory is that of one bucket and what the replicas send for it. It is not unpacked at
// once, even where the sum is there at once: the gradient that filled it is still held by whoever has made it.
void GradientReducer::advance() {
  const OnLane on_lane(lane_.get());
  const at::NoGradGuard no_grad;
  if (is_under_way_) {
    if (!sum_->advance()) return;
    is_under_way_ = false;
    sum_->finish(buckets_[next_ - 1].memory, backward_);
  }
  if (next_ == buckets_.size() || buckets_[next_].num_missing > 0 || !sum_->is_free()) return;
  if (lane_) this_ranks_device().go_on_behind(buckets_[next_].ready);
  sum_->start(buckets_[next_].memory, divisor_);
  is_under_way_ = true;
  ++next_;
}

void GradientReducer::finish() {
  backward_ = Backward::kIsOver;
  for (size_t i = 0; i < parameters_.size(); ++i) mark_ready(i);
  for (; is_under_way_ || next_ < buckets_.size(); advance()) {
    const OnLane on_lane(lane_.get());
    sum_->wait();
  }
  sum_->wait();  // messages do not outlive the step, as the transport need not
}

}  // namespace smp::runtime
