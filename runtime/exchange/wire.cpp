// Encoding of tensors in control messages.
#include "runtime/exchange/wire.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <stdexcept>

#include "partitioner/graph/tensor_bytes.h"
#include "runtime/device/device.h"

namespace smp::runtime {
namespace {

constexpr size_t kBytesPerDimension = 2 * sizeof(int64_t);  // size and stride

enum class Place : uint8_t { kHost, kWrappedNumber, kRanksDevice };  // a wrapped number is on the host

bool travels(c10::ScalarType dtype) {
  return dtype >= c10::ScalarType::Byte && dtype < c10::ScalarType::Undefined && !c10::isQIntType(dtype);
}

}  // namespace

void WireReader::check_room(uint64_t count, size_t least_bytes) const {
  if (count <= left_.size() / least_bytes) return;
  const std::string each = least_bytes == 1 ? " more bytes" : " items of at least " + std::to_string(least_bytes) + " bytes";
  refuse(std::to_string(count) + each, std::to_string(left_.size()) + " bytes that are left");
}

std::string_view WireReader::raw(size_t num_bytes) {
  check_room(num_bytes, 1);
  const std::string_view head = left_.substr(0, num_bytes);
  left_.remove_prefix(num_bytes);
  return head;
}

void WireReader::expect_end() const {
  if (!at_end()) refuse("the end", std::to_string(left_.size()) + " more bytes");
}

void WireReader::refuse(const std::string& expected, const std::string& got, size_t bytes_back) const {
  throw std::runtime_error(std::string(what_) + ": expected " + expected + " at byte " +
                           std::to_string(all_.size() - left_.size() - bytes_back) + ", got " + got +
                           ". The bytes are damaged, or ranks run different versions of smp.");
}

void WireWriter::put(const at::Tensor& tensor) {
  const bool is_here = is_on_host(tensor);
  TORCH_CHECK_VALUE(is_within_reach(tensor) && tensor.layout() == at::kStrided && travels(tensor.scalar_type()),
                    "control message: expected a dense tensor of the host or the rank's device that is not quantized, got ",
                    tensor.toString(), ".");
  // Content is what matters here; strides are those of a dense copy in the same dimension order.
  const at::Tensor dense = is_here ? tensor.detach().clone() : tensor.detach().clone().to(host().type);
  put(dense.scalar_type());
  const bool is_wrapped_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  put(is_wrapped_number ? Place::kWrappedNumber : is_here ? Place::kHost : Place::kRanksDevice);
  put(static_cast<uint32_t>(dense.dim()));
  for (int64_t d = 0; d < dense.dim(); ++d) {
    put<int64_t>(dense.size(d));
    put<int64_t>(dense.stride(d));
  }
  put(bytes_of(dense));
}

c10::ScalarType WireReader::get_dtype() {
  const auto dtype = get_enumerator(c10::ScalarType::Undefined);
  if (!travels(dtype)) refuse("the type of a dense tensor", std::to_string(static_cast<int>(dtype)), sizeof dtype);
  return dtype;
}

at::Tensor WireReader::get_tensor() {
  const c10::ScalarType dtype = get_dtype();
  const auto place = get_enumerator(Place::kRanksDevice);
  const bool is_wrapped_number = place == Place::kWrappedNumber;
  std::vector<int64_t> sizes(get_count<uint32_t>(kBytesPerDimension)), strides(sizes.size());
  for (size_t d = 0; d < sizes.size(); ++d) {
    sizes[d] = get_at_least<int64_t>(0);
    strides[d] = get_at_least<int64_t>(0);
  }
  if (is_wrapped_number && !sizes.empty()) refuse("a wrapped number without dimensions", std::to_string(sizes.size()));
  const std::string_view data = get_text();
  const auto bytes = partitioner::dense_bytes(sizes, dtype);
  if (!bytes || static_cast<uint64_t>(*bytes) != data.size()) {
    refuse("the data of a tensor of sizes " + c10::str(at::IntArrayRef(sizes)) + " and type " + c10::toString(dtype),
           std::to_string(data.size()) + " bytes", data.size());
  }
  const auto refuse_strides = [&] {
    refuse("strides of a dense tensor of sizes " + c10::str(at::IntArrayRef(sizes)), c10::str(at::IntArrayRef(strides)),
           data.size());
  };
  if (partitioner::extent_bytes(sizes, strides, dtype) != bytes) refuse_strides();  // the memory is as large as the data
  const auto is_no_bool = [](char byte) { return byte != 0 && byte != 1; };
  if (dtype == c10::ScalarType::Bool && std::any_of(data.begin(), data.end(), is_no_bool)) {
    refuse("bytes of 0 and 1 as bools", "others", data.size());
  }
  at::Tensor tensor = at::empty_strided(sizes, strides, at::TensorOptions(host().type).dtype(dtype));
  if (!data.empty() && !tensor.is_non_overlapping_and_dense()) refuse_strides();
  set_bytes(tensor, data);
  if (is_wrapped_number) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return place == Place::kRanksDevice ? tensor.to(this_ranks_device().type) : tensor;
}

at::Tensor read_tensor(std::string_view bytes, std::string_view what) {
  return read_all(bytes, what, [](WireReader& in) { return in.get_tensor(); });
}

}  // namespace smp::runtime
