// Handing bytes over: length, bytes in parts, and an empty message back.
#include "runtime/exchange/object_messages.h"

#include <algorithm>
#include <memory>

#include "runtime/exchange/tags.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {
namespace {

constexpr int64_t kPartBytes = Transport::kPartBytes;

struct Outgoing {
  int64_t num_bytes;
  std::string bytes;
};

std::vector<Request> post(Transport& transport, int dest, const Outgoing& message) {
  std::vector<Request> sent;
  sent.push_back(transport.isend(dest, kObjectTag, &message.num_bytes, sizeof message.num_bytes));
  for (int64_t start = 0; start < message.num_bytes; start += kPartBytes) {
    sent.push_back(
        transport.isend(dest, kObjectTag, message.bytes.data() + start, std::min(kPartBytes, message.num_bytes - start)));
  }
  return sent;
}

std::string waits_for(const std::string& operation, int dest) {
  return operation + ", which waits until rank " + std::to_string(dest) + " calls recv_from";
}

}  // namespace

void hand_over(Transport& transport, const std::vector<int>& dests, const std::string& bytes, const std::string& operation) {
  const auto message = std::make_shared<const Outgoing>(Outgoing{static_cast<int64_t>(bytes.size()), bytes});
  try {
    std::vector<std::vector<Request>> sent;
    for (const int dest : dests) sent.push_back(post(transport, dest, *message));
    for (size_t d = 0; d < dests.size(); ++d) {
      const std::string action = waits_for(operation, dests[d]);
      for (Request& request : sent[d]) request.wait(action);
      transport.irecv(dests[d], kObjectReceivedTag, nullptr, 0).wait(action);
    }
  } catch (...) {
    abandon(message);
    throw;
  }
}

std::string take_over(Transport& transport, int source, const std::string& operation) {
  std::string bytes = transport.receive_bytes(source, kObjectTag, kPartBytes, operation);
  transport.isend(source, kObjectReceivedTag, nullptr, 0).wait(operation);
  return bytes;
}

}  // namespace smp::runtime
