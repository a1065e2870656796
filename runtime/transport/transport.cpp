// Owns what every transport shares: strings of unknown length.
#include "runtime/transport/transport.h"

namespace smp::runtime {

void Transport::send_bytes(int dest, int tag, std::string_view bytes) {
  const auto num_bytes = static_cast<int64_t>(bytes.size());
  Request size_sent = isend(dest, tag, &num_bytes, sizeof(num_bytes));
  Request bytes_sent = isend(dest, tag, bytes.data(), num_bytes);
  size_sent.wait("send_bytes");
  bytes_sent.wait("send_bytes");
}

std::string Transport::receive_bytes(int source, int tag) {
  int64_t num_bytes = 0;
  irecv(source, tag, &num_bytes, sizeof(num_bytes)).wait("receive_bytes");
  std::string bytes(static_cast<size_t>(num_bytes), '\0');
  irecv(source, tag, bytes.data(), num_bytes).wait("receive_bytes");
  return bytes;
}

}  // namespace smp::runtime
