// The one place that uses StorageImpl's custom error texts.
#include "runtime/libtorch/raw_pointers.h"

namespace smp::runtime {
namespace {

// StorageImpl can only switch the refusal of reads on. An explicit instantiation may name a private member, and so hands
// out the pointer that switches it off again.
template <bool c10::StorageImpl::* kMember>
struct StorageAccess {
  friend bool c10::StorageImpl::* throws_on_read() { return kMember; }
};
bool c10::StorageImpl::* throws_on_read();
template struct StorageAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void refuse_raw_pointers(c10::StorageImpl& storage, const std::string& text) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(text);
}

void accept_raw_pointers(c10::StorageImpl& storage) {
  storage.*throws_on_read() = false;
  storage.get_extra_meta().custom_data_ptr_error_msg_.reset();
}

}  // namespace smp::runtime
