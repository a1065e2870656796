// Owns the store of torch.distributed that a world started by torchrun meets over.
#include <sys/socket.h>

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/udp.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "runtime/launch/addresses.h"
#include "runtime/transport/error.h"
#include "runtime/transport/socket_transport.h"

namespace smp::runtime::sockets {
namespace {

namespace asio = boost::asio;

// The address of this host from which it reaches `host`. Nothing is sent.
std::string own_address_towards(const std::string& host, const std::string& port) {
  asio::io_context io;
  asio::ip::udp::socket socket(io);
  asio::connect(socket, asio::ip::udp::resolver(io).resolve(host, port));
  return socket.local_endpoint().address().to_string();
}

}  // namespace

std::shared_ptr<Transport> create(const Launch& launch, std::chrono::milliseconds timeout) {
  static int num_worlds = 0;  // of this process; all ranks make them in the same order
  const Launch::Store& at = launch.store;
  const std::string place = at.host + ":" + std::to_string(at.port);
  Newcomer self{launch.rank, launch.size, launch.local_size};
  try {
    if (launch.local_size < launch.size) self.host = own_address_towards(at.host, std::to_string(at.port));
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(at.port);
    options.isServer = launch.rank == 0 && !at.is_kept_by_launcher;
    options.waitWorkers = false;
    options.timeout = timeout;
    options.multiTenant = true;
    const auto store = c10::make_intrusive<c10d::TCPStore>(at.host, options);
    // The script's process group may come to it at any later time. Never destroyed: a fork has not the thread that serves
    // it.
    static auto* const kept = new c10::intrusive_ptr<c10d::TCPStore>;
    if (options.isServer) *kept = store;
    c10d::PrefixStore own("smp/" + std::to_string(num_worlds++), store);
    std::shared_ptr<Transport> world = create(own, self, timeout);
    world->barrier();  // where rank 0 keeps the store, that ends with it
    return world;
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    const std::string text = error.what();
    const std::string holder = text.find("EADDRINUSE") == std::string::npos ? "" : listener_on(at.port);
    throw CommError("expected the store of torch.distributed at " + place +
                    " (MASTER_ADDR, MASTER_PORT), got: " + text.substr(0, text.find('\n')) +
                    (holder.empty() ? "" : ". The port is that of " + holder + ": give another MASTER_PORT."));
  }
}

}  // namespace smp::runtime::sockets
