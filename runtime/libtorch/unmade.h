// Tensors that have sizes but no values yet: what they look like, and how they get their values. Records nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

namespace smp::runtime {

/// Computes values, from what was recorded when their tensors were made.
class ValueSource {
 public:
  virtual ~ValueSource() = default;
  /// Fresh storages with the values of these, by their numbers, in their order.
  virtual std::vector<c10::Storage> compute(const std::vector<int32_t>& storages) const = 0;
};

/// Where the values of a storage come from.
struct Origin {
  std::shared_ptr<ValueSource> source;
  int32_t storage = -1;  // its number there
};

/// A CPU storage without memory. Operators that only look at geometry run on its tensors; an access to the data throws a
/// text that names `maker`, the operator that made it. The source lives as long as such a storage.
c10::Storage make_unmade_storage(Origin origin, int64_t num_bytes, const std::string& maker);

/// Null for a tensor that has data, or none of its own (sparse).
const Origin* origin_of(const at::Tensor& tensor);
inline bool is_unmade(const at::Tensor& tensor) { return origin_of(tensor) != nullptr; }

/// Gives all of them that are unmade their values; every tensor on the same storages has them too. Their sources run as far
/// as these need, on this thread. Not while another thread draws from the default CPU generator.
void make_values(const std::vector<at::Tensor>& tensors);

/// The tensor itself if it has data, else a copy of what make_values() would give it.
at::Tensor value_of(const at::Tensor& tensor);

}  // namespace smp::runtime
