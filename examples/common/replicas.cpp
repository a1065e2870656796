// The check of --batch-size.
#include "examples/common/replicas.h"

#include <c10/util/Exception.h>

#include "smp/init.h"

namespace examples {

int64_t rows_per_replica(int64_t batch_size) {
  TORCH_CHECK_VALUE(batch_size % smp::dp_size() == 0, "--batch-size: expected a multiple of the ", smp::dp_size(),
                    " replicas, got ", batch_size, ". It counts the samples of all replicas together.");
  return batch_size / smp::dp_size();
}

}  // namespace examples
