// Handing bytes over: length, bytes in parts, and an empty message back.
#include "runtime/exchange/object_messages.h"

#include <memory>

#include "runtime/exchange/tags.h"
#include "runtime/transport/abandoned.h"

namespace smp::runtime {
namespace {

struct Outgoing {
  int64_t num_bytes;
  std::string bytes;
};

std::string waits_for(const std::string& operation, int dest) {
  return operation + ", which waits until rank " + std::to_string(dest) + " calls recv_from";
}

}  // namespace

void hand_over(Transport& transport, const std::vector<int>& dests, const std::string& bytes, const std::string& operation) {
  const auto message = std::make_shared<const Outgoing>(Outgoing{static_cast<int64_t>(bytes.size()), bytes});
  keeping(message, [&] {
    std::vector<std::vector<Request>> sent;
    for (const int dest : dests) {
      sent.push_back(transport.isend_bytes(dest, kObjectTag, message->bytes, &message->num_bytes));
    }
    for (size_t d = 0; d < dests.size(); ++d) {
      const std::string action = waits_for(operation, dests[d]);
      for (Request& request : sent[d]) request.wait(action);
      transport.irecv(dests[d], kObjectReceivedTag, nullptr, 0).wait(action);
    }
  });
}

std::string take_over(Transport& transport, int source, const std::string& operation) {
  std::string bytes = transport.receive_bytes(source, kObjectTag, Transport::kPartBytes, operation);
  transport.isend(source, kObjectReceivedTag, nullptr, 0).wait(operation);
  return bytes;
}

}  // namespace smp::runtime
