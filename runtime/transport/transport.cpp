// Owns what every transport shares: strings of unknown length.
#include "runtime/transport/transport.h"

#include <algorithm>
#include <memory>

#include "runtime/transport/abandoned.h"
#include "runtime/transport/error.h"

namespace smp::runtime {
namespace {

struct Incoming {
  int64_t num_bytes = 0;
  std::string bytes;
};

void receive_exactly(Transport& transport, int source, int tag, void* data, int64_t num_bytes, const std::string& action) {
  const int64_t got = transport.irecv(source, tag, data, num_bytes).wait(action);
  if (got != num_bytes) {
    throw CommError(action + ": expected a message of " + std::to_string(num_bytes) + " bytes from rank " +
                    std::to_string(source) + ", got one of " + std::to_string(got));
  }
}

}  // namespace

std::vector<Request> Transport::isend_bytes(int dest, int tag, std::string_view bytes, const int64_t* num_bytes,
                                            int64_t part_bytes) {
  std::vector<Request> sent;
  sent.push_back(isend(dest, tag, num_bytes, sizeof *num_bytes));
  for (int64_t start = 0; start < *num_bytes; start += part_bytes) {
    sent.push_back(isend(dest, tag, bytes.data() + start, std::min(part_bytes, *num_bytes - start)));
  }
  return sent;
}

void Transport::send_bytes(int dest, int tag, std::string_view bytes, int64_t part_bytes) {
  const auto num_bytes = static_cast<int64_t>(bytes.size());
  for (Request& sent : isend_bytes(dest, tag, bytes, &num_bytes, part_bytes)) sent.wait("send_bytes");
}

std::string Transport::receive_bytes(int source, int tag, int64_t part_bytes, const std::string& action) {
  const auto message = std::make_shared<Incoming>();
  keeping(message, [&] {
    receive_exactly(*this, source, tag, &message->num_bytes, sizeof message->num_bytes, action);
    if (message->num_bytes < 0) throw CommError(action + ": expected a length, got " + std::to_string(message->num_bytes));
    for (int64_t start = 0; start < message->num_bytes; start += part_bytes) {
      const int64_t part = std::min(part_bytes, message->num_bytes - start);
      message->bytes.resize(static_cast<size_t>(start + part));
      receive_exactly(*this, source, tag, message->bytes.data() + start, part, action);
    }
  });
  return std::move(message->bytes);
}

}  // namespace smp::runtime
