// Owns the wording of refused messages and groups.
#include "runtime/transport/checks.h"

#include <c10/util/Exception.h>

#include <algorithm>

#include "runtime/device/device.h"
#include "runtime/transport/transport.h"

namespace smp::runtime {

std::string text_of(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return "{" + text + "}";
}

void check_host_memory(const char* operation, const DeviceMemory& memory) {
  TORCH_CHECK_VALUE(memory.device == DeviceMemory().device, operation,
                    ": expected memory of the host, which this transport moves, got memory of a device of type ",
                    memory.device, ". Copy it to the host first, or take a transport of that device.");
}

void check_ranks_memory(const char* operation, const DeviceMemory& memory) {
  if (memory.device != this_ranks_device().type) check_host_memory(operation, memory);
}

void check_message(const char* operation, int peer, int size, int tag, int64_t num_bytes) {
  TORCH_CHECK_VALUE(peer >= 0 && peer < size, operation, ": expected a rank of this group, 0 ... ", size - 1, ", got ", peer,
                    ".");
  TORCH_CHECK_VALUE(tag >= 0 && tag <= kMaxTag, operation, ": expected a tag of 0 ... ", kMaxTag, ", got ", tag, ".");
  TORCH_CHECK_VALUE(num_bytes >= 0, operation, ": expected at least 0 bytes, got ", num_bytes, ".");
}

int64_t check_sum(const Transport& group, const DeviceMemory& terms, c10::ScalarType type) {
  using c10::ScalarType;
  const bool is_known = type == ScalarType::Float || type == ScalarType::Double || type == ScalarType::Long ||
                        type == ScalarType::BFloat16 || type == ScalarType::Half;
  TORCH_CHECK_TYPE(is_known, "all_reduce_sum: expected Float, Double, Long, BFloat16 or Half, got ", type,
                   ". Convert the tensor before the call.");
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(type));
  const int64_t num_elements = terms.num_bytes / element_bytes;
  TORCH_CHECK_VALUE(terms.num_bytes >= 0 && terms.num_bytes % element_bytes == 0,
                    "all_reduce_sum: expected at least 0 elements and whole ones, got ", terms.num_bytes, " bytes of ", type,
                    ".");
  check_ranks_memory("all_reduce_sum", terms);
  if (!group.moves_memory_of(terms.device)) check_host_memory("all_reduce_sum", terms);
  return num_elements;
}

int check_group(const std::vector<int>& ranks, int my_rank, int size) {
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < size, "group: expected ranks of 0 ... ", size - 1, ", got rank ", rank, " in ",
                      text_of(ranks), ".");
    TORCH_CHECK_VALUE(std::count(ranks.begin(), ranks.end(), rank) == 1, "group: expected distinct ranks, got rank ", rank,
                      " twice in ", text_of(ranks), ".");
  }
  const auto mine = std::find(ranks.begin(), ranks.end(), my_rank);
  TORCH_CHECK_VALUE(mine != ranks.end(), "group: expected the calling rank ", my_rank, " among the members, got ",
                    text_of(ranks), ". Call it on the members only.");
  return static_cast<int>(mine - ranks.begin());
}

}  // namespace smp::runtime
