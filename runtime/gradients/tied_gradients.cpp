// Gradient sums over stages.
#include "runtime/gradients/tied_gradients.h"

#include <ATen/core/grad_mode.h>

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

}  // namespace smp::runtime
