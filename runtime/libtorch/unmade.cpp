// Storages whose DataPtr holds no data but the way to them.
#include "runtime/libtorch/unmade.h"

#include <c10/core/StorageImpl.h>

#include <map>
#include <unordered_set>

#include "runtime/device/device.h"
#include "runtime/libtorch/raw_pointers.h"
#include "runtime/libtorch/tensor_spec.h"

namespace smp::runtime {

namespace {

void delete_origin(void* origin) { delete static_cast<Origin*>(origin); }

// Takes over the memory of `made`.
void move_into(c10::StorageImpl& unmade, const c10::Storage& made) {
  c10::StorageImpl& source = *made.unsafeGetStorageImpl();
  TORCH_INTERNAL_ASSERT(source.nbytes() == unmade.nbytes(), source.nbytes(), " bytes for ", unmade.nbytes());
  accept_raw_pointers(unmade);
  unmade.set_data_ptr_noswap(std::move(source._mutable_data_ptr_no_checks()));
}

}  // namespace

c10::Storage make_unmade_storage(Origin origin, int64_t num_bytes, const std::string& maker) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<size_t>(num_bytes),
      c10::DataPtr(nullptr, new Origin(std::move(origin)), &delete_origin, c10::Device(host().type)),
      c10::GetAllocator(host().type), /*resizable=*/true);
  // In the words of any language: it is thrown by LibTorch, and passes no boundary at which others could be put in.
  refuse_raw_pointers(*storage, "expected a tensor with values, got one made by " + maker +
                                    " under delayed initialisation, which has none yet. It gets them in the first step of "
                                    "its DistributedModel, on the ranks that hold it. Initialise it by operators inside the "
                                    "scope; initialize_parameters(module) of smp gives a module its values at once, and "
                                    "state_dict() of the DistributedModel copies of them.");
  return c10::Storage(std::move(storage));
}

const Origin* origin_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = storage_of(tensor)->_mutable_data_ptr_no_checks();
  return data.get_deleter() == &delete_origin ? static_cast<const Origin*>(data.get_context()) : nullptr;
}

void make_values(const std::vector<at::Tensor>& tensors) {
  struct Wanted {
    std::shared_ptr<ValueSource> source;
    std::vector<int32_t> numbers;
    std::vector<c10::StorageImpl*> storages;
  };
  std::map<const ValueSource*, Wanted> wanted;
  std::unordered_set<const c10::StorageImpl*> seen;
  for (const at::Tensor& tensor : tensors) {
    const Origin* origin = origin_of(tensor);
    if (origin == nullptr || !seen.insert(storage_of(tensor)).second) continue;
    Wanted& own = wanted[origin->source.get()];
    own.source = origin->source;
    own.numbers.push_back(origin->storage);
    own.storages.push_back(storage_of(tensor));
  }
  for (const auto& [key, own] : wanted) {
    std::vector<c10::Storage> made = own.source->compute(own.numbers);
    for (size_t i = 0; i < made.size(); ++i) move_into(*own.storages[i], made[i]);
  }
}

at::Tensor value_of(const at::Tensor& tensor) {
  const Origin* origin = origin_of(tensor);
  if (origin == nullptr) return tensor;
  return tensor_of(spec_of(tensor), origin->source->compute({origin->storage}).front());
}

}  // namespace smp::runtime
