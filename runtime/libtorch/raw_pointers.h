// Storages without data, whose tensors still have sizes: an access to their data throws a text of ours.
#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace smp::runtime {

/// From now on data_ptr() and every kernel that looks at the data throw `text`.
void refuse_raw_pointers(c10::StorageImpl& storage, const std::string& text);

/// Undoes it, for a storage that is given data next.
void accept_raw_pointers(c10::StorageImpl& storage);

}  // namespace smp::runtime
