// How a batch is shared between replicas.
#pragma once

#include <cstdint>

namespace examples {

/// Rows of a batch that one replica gets: rows dp_rank() * n ... (dp_rank() + 1) * n - 1 are this
/// one's. Throws c10::ValueError unless --batch-size is a multiple of the replicas.
int64_t rows_per_replica(int64_t batch_size);

}  // namespace examples
