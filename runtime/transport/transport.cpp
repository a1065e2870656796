// Owns what every transport shares: strings of unknown length.
#include "runtime/transport/transport.h"

#include <algorithm>

#include "runtime/transport/long_message.h"

namespace smp::runtime {

void Transport::send_bytes(int dest, int tag, std::string_view bytes, int64_t part_bytes) {
  const auto num_bytes = static_cast<int64_t>(bytes.size());
  Request size_sent = isend(dest, tag, &num_bytes, sizeof(num_bytes));
  std::vector<Request> parts_sent;
  for (int64_t start = 0; start < num_bytes; start += part_bytes) {
    parts_sent.push_back(isend(dest, tag, bytes.data() + start, std::min(part_bytes, num_bytes - start)));
  }
  size_sent.wait("send_bytes");
  for (Request& part : parts_sent) part.wait("send_bytes");
}

std::string Transport::receive_bytes(int source, int tag, int64_t part_bytes) {
  return receive_long(*this, source, tag, part_bytes, "receive_bytes");
}

}  // namespace smp::runtime
