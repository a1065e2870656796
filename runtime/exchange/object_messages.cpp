// Handing bytes over: length, then bytes in parts.
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

}  // namespace

void hand_over(Transport& transport, const std::vector<int>& dests, const std::string& bytes, const std::string& operation,
               const std::function<void(int dest)>& hear) {
  const auto message = std::make_shared<const Outgoing>(Outgoing{static_cast<int64_t>(bytes.size()), bytes});
  keeping(message, [&] {
    std::vector<std::vector<Request>> sent;
    for (const int dest : dests) {
      sent.push_back(transport.isend_bytes(dest, kObjectTag, message->bytes, &message->num_bytes));
    }
    for (size_t d = 0; d < dests.size(); ++d) {
      hear(dests[d]);
      for (Request& request : sent[d]) request.wait(operation);
    }
  });
}

std::string take_over(Transport& transport, int source, const std::string& operation) {
  return transport.receive_bytes(source, kObjectTag, Transport::kPartBytes, operation);
}

}  // namespace smp::runtime
