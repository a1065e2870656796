// Tensors in messages.
#include "smp/serialiser.h"

#include <c10/util/Exception.h>

#include "runtime/wire.h"

namespace smp {

void Writer::put_tensor(const at::Tensor& tensor) {
  if (tensors_ != nullptr) return tensors_->push_back(tensor);
  put(tensor.defined());
  if (!tensor.defined()) return;
  TORCH_CHECK_VALUE(tensor.is_cpu() && tensor.layout() == at::kStrided && !tensor.is_quantized(),
                    "message: expected a dense CPU tensor, got ", tensor.toString(),
                    ". Convert it first: tensor.to(at::kCPU), to_dense() or dequantize().");
  runtime::WireWriter out;
  out.put(tensor.resolve_conj().resolve_neg());
  put(out.take());
}

std::string_view Reader::get_bytes(size_t num_bytes) {
  TORCH_CHECK_VALUE(num_bytes <= bytes_.size(), "message: expected ", num_bytes, " more bytes, got ", bytes_.size(),
                    ". Serialiser::read must read what Serialiser::write wrote, in the same order.");
  const std::string_view head = bytes_.substr(0, num_bytes);
  bytes_.remove_prefix(num_bytes);
  return head;
}

at::Tensor Reader::get_tensor() {
  if (tensors_ != nullptr) {
    TORCH_CHECK_VALUE(next_tensor_ < tensors_->size(), "message: expected one more tensor, got ", tensors_->size(),
                      " in all. Serialiser::read must read what Serialiser::write wrote, in the same order.");
    return (*tensors_)[next_tensor_++];
  }
  if (!get<bool>()) return {};
  const std::string_view bytes = get_bytes(get<uint64_t>());
  return runtime::WireReader(bytes).get_tensor();
}

}  // namespace smp
