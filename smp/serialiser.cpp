// Tensors in messages.
#include "smp/serialiser.h"

#include <c10/util/Exception.h>

#include <stdexcept>

#include "runtime/device/device.h"
#include "runtime/exchange/wire.h"

namespace smp {

void Nesting::refuse() {
  TORCH_CHECK_VALUE(false, "message: expected objects within objects of at most ", kMostDeep,
                    " levels, got more. Send a flat list, with positions in place of what lies within.");
}

void Writer::check_written(size_t num_elements, size_t num_written) {
  TORCH_CHECK_VALUE(num_elements <= num_written, "message: expected a byte or a tensor at least of each of ", num_elements,
                    " elements of a container, got ", num_written,
                    " in all. Send their number in place of elements that are empty.");
}

void Writer::put_tensor(const at::Tensor& tensor) {
  if (tensors_ != nullptr) return tensors_->push_back(tensor);
  put(tensor.defined());
  if (!tensor.defined()) return;
  TORCH_CHECK_VALUE(runtime::is_on_host(tensor) && tensor.layout() == at::kStrided && !tensor.is_quantized(),
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

bool Reader::get_bool() {
  const char byte = get_bytes(1).front();
  TORCH_CHECK_VALUE(byte == 0 || byte == 1, "message: expected 0 or 1 as a bool, got ", static_cast<int>(byte),
                    ". Serialiser::read must read what Serialiser::write wrote, in the same order.");
  return byte != 0;
}

void Reader::expect_end(const std::string& type, const char* where) const {
  TORCH_CHECK_VALUE(at_end(), where, ": expected Serialiser::read of ", type, " to read all that Serialiser::write wrote, ",
                    "got some left. Read in the order of writing.");
}

uint64_t Reader::get_count() {
  const auto count = get<uint64_t>();
  const size_t left = bytes_.size() + (tensors_ == nullptr ? 0 : tensors_->size() - next_tensor_);
  TORCH_CHECK_VALUE(count <= left, "message: expected at most ", left,
                    " elements of a container, as many as bytes and tensors ", "are left, got ", count,
                    ". Serialiser::read must read what Serialiser::write wrote, in the same order.");
  return count;
}

at::Tensor Reader::get_tensor() {
  if (tensors_ != nullptr) {
    TORCH_CHECK_VALUE(next_tensor_ < tensors_->size(), "message: expected one more tensor, got ", tensors_->size(),
                      " in all. Serialiser::read must read what Serialiser::write wrote, in the same order.");
    return (*tensors_)[next_tensor_++];
  }
  if (!get<bool>()) return {};
  const std::string_view bytes = get_bytes(get<uint64_t>());
  try {
    return runtime::read_tensor(bytes, "tensor");
  } catch (const std::runtime_error& error) {
    TORCH_CHECK_VALUE(false, "message: ", error.what());
  }
}

}  // namespace smp
