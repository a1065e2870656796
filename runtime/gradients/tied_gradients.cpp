// Gradient sums over stages and replicas.
#include "runtime/gradients/tied_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <span>

#include "runtime/device/device.h"
#include "runtime/exchange/tags.h"
#include "runtime/exchange/wire.h"

namespace smp::runtime {
namespace {

std::string encode_gradient(const at::Tensor& gradient) {
  WireWriter out;
  out.put(gradient.defined());
  if (gradient.defined()) out.put(gradient);
  return out.take();
}

at::Tensor decode_gradient(const std::string& bytes) {
  return read_all(bytes, "gradient of a tied weight",
                  [](WireReader& in) { return in.get<bool>() ? in.get_tensor() : at::Tensor(); });
}

at::Tensor sum(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() ? a : b;
  return a.add(b);
}

void average_bucket(std::span<at::Tensor> parameters, Transport& replicas, int divisor) {
  int64_t num_elements = 0;
  for (const at::Tensor& parameter : parameters) num_elements += num_reals(parameter);
  const c10::ScalarType type = c10::toRealValueType(parameters.front().scalar_type());
  at::Tensor flat = at::empty({num_elements}, parameters.front().options().dtype(type).requires_grad(false));
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters) {
    at::Tensor part = flat.narrow(0, offset, num_reals(parameter));
    parameter.grad().defined() ? part.copy_(reals(parameter.grad()).reshape({-1})) : part.zero_();
    offset += num_reals(parameter);
  }
  replicas.all_reduce_sum(memory_of(flat), flat.scalar_type());
  flat.div_(divisor);
  offset = 0;
  for (at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined() || parameter.grad().is_conj()) parameter.mutable_grad() = at::empty_like(parameter);
    at::Tensor mean = reals(parameter.grad());
    mean.copy_(flat.narrow(0, offset, num_reals(parameter)).view(mean.sizes()));
    offset += num_reals(parameter);
  }
}

}  // namespace

TiedGradients::TiedGradients(const TensorHomes& homes, const Bindings& bindings, const TrainedOn& trained_on,
                             Transport& pipeline)
    : pipeline_(pipeline) {
  std::vector<at::Tensor> begun;  // no gradient changes unless there is memory for all
  for (const NamedTensor& named : bindings.tensors()) {
    const auto placed = homes.find(named.name);
    if (placed == homes.end()) continue;  // of a model that no step has used
    const TensorHome& home = placed->second;
    if (named.kind != partitioner::ValueKind::kParameter || !home.is_tied() || !home.is_on(pipeline.rank())) continue;
    const std::vector<int> trainers = trained_on(named.name);
    Tied tied{.parameter = named.tensor,
              .ranks = home.whole_on(),
              .has_one_trainer = trainers.size() == 1,
              .earlier = named.tensor.grad()};
    const bool continues = tied.has_one_trainer && trainers.front() == pipeline.rank() && tied.earlier.defined();
    begun.push_back(continues ? tied.earlier.clone() : at::Tensor());
    tied_.push_back(std::move(tied));
  }
  for (size_t i = 0; i < tied_.size(); ++i) tied_[i].parameter.mutable_grad() = std::move(begun[i]);
}

TiedGradients::~TiedGradients() {
  for (Tied& tied : tied_) tied.parameter.mutable_grad() = std::move(tied.earlier);
}

at::Tensor TiedGradients::summed(const Tied& tied) {
  at::Tensor total = tied.parameter.grad();
  if (pipeline_.rank() != tied.ranks.front()) {
    pipeline_.send_bytes(tied.ranks.front(), kTiedGradientTag, encode_gradient(total));
    return decode_gradient(pipeline_.receive_bytes(tied.ranks.front(), kTiedGradientTag));
  }
  for (size_t i = 1; i < tied.ranks.size(); ++i) {
    total = sum(total, decode_gradient(pipeline_.receive_bytes(tied.ranks[i], kTiedGradientTag)));
  }
  const std::string bytes = encode_gradient(total);
  for (size_t i = 1; i < tied.ranks.size(); ++i) {
    pipeline_.send_bytes(tied.ranks[i], kTiedGradientTag, bytes);
  }
  return total;
}

void TiedGradients::finish() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  for (const Tied& tied : tied_) gradients.push_back(tied.has_one_trainer ? summed(tied) : sum(tied.earlier, summed(tied)));
  for (size_t i = 0; i < tied_.size(); ++i) {
    tied_[i].parameter.mutable_grad() = std::move(gradients[i]);
  }
  tied_.clear();
}

at::Tensor reals(const at::Tensor& gradient) {
  TORCH_CHECK_NOT_IMPLEMENTED(gradient.layout() == at::kStrided,
                              "gradients: expected dense ones, which replicas can add up, got ", gradient.toString(), " ",
                              gradient.sizes(), ". Make dense ones (sparse=false of an embedding).");
  return gradient.is_complex() ? at::view_as_real(gradient.resolve_conj()) : gradient;
}

int64_t num_reals(const at::Tensor& parameter) { return parameter.is_complex() ? 2 * parameter.numel() : parameter.numel(); }

void average_gradients(const std::vector<at::Tensor>& parameters, Transport& replicas, int64_t bucket_bytes, int divisor) {
  if (replicas.size() == 1 || parameters.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<int64_t> have;
  for (const at::Tensor& parameter : parameters) have.push_back(parameter.grad().defined());
  replicas.all_reduce_sum(have.data(), static_cast<int64_t>(have.size()), c10::ScalarType::Long);
  std::map<c10::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (have[i] > 0) by_dtype[parameters[i].scalar_type()].push_back(parameters[i]);
  }
  for (auto& [dtype, list] : by_dtype) {
    size_t first = 0;
    while (first < list.size()) {
      size_t end = first;
      int64_t bytes = 0;
      while (end < list.size() && (end == first || bytes + static_cast<int64_t>(list[end].nbytes()) <= bucket_bytes)) {
        bytes += static_cast<int64_t>(list[end++].nbytes());
      }
      average_bucket(std::span(list).subspan(first, end - first), replicas, divisor);
      first = end;
    }
  }
}

}  // namespace smp::runtime
