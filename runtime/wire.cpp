// Encoding of tensors in control messages.
#include "runtime/wire.h"

#include <ATen/ops/empty_strided.h>

#include <stdexcept>

namespace smp::runtime {

std::string_view WireReader::raw(size_t num_bytes) {
  if (num_bytes > bytes_.size()) {
    throw std::runtime_error("control message: expected " + std::to_string(num_bytes) + " more bytes, got " +
                             std::to_string(bytes_.size()) + ". Ranks run different versions of smp.");
  }
  const std::string_view head = bytes_.substr(0, num_bytes);
  bytes_.remove_prefix(num_bytes);
  return head;
}

void WireWriter::put(const at::Tensor& tensor) {
  // Content is what matters here; strides are those of a dense copy in the same dimension order.
  const at::Tensor dense = tensor.detach().clone();
  put<int8_t>(static_cast<int8_t>(dense.scalar_type()));
  put<uint8_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  put<uint8_t>(static_cast<uint8_t>(dense.dim()));
  for (int64_t d = 0; d < dense.dim(); ++d) {
    put<int64_t>(dense.size(d));
    put<int64_t>(dense.stride(d));
  }
  put(std::string_view(static_cast<const char*>(dense.const_data_ptr()),
                       static_cast<size_t>(dense.numel()) * dense.element_size()));
}

at::Tensor WireReader::get_tensor() {
  const auto dtype = static_cast<c10::ScalarType>(get<int8_t>());
  const bool is_wrapped_number = get<uint8_t>() != 0;
  const auto dims = get<uint8_t>();
  std::vector<int64_t> sizes, strides;
  for (uint8_t d = 0; d < dims; ++d) {
    sizes.push_back(get<int64_t>());
    strides.push_back(get<int64_t>());
  }
  at::Tensor tensor = at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype));
  const std::string_view data = raw(get<uint64_t>());
  if (data.size() != static_cast<size_t>(tensor.numel()) * tensor.element_size()) {
    throw std::runtime_error("control message: a tensor's data do not fit its sizes");
  }
  if (!data.empty()) std::memcpy(tensor.mutable_data_ptr(), data.data(), data.size());
  if (is_wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

}  // namespace smp::runtime
