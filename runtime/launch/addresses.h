// The addresses of this host, and who holds a port, for texts.
#pragma once

#include <string>
#include <vector>

namespace smp::runtime {

/// "eth0 10.0.0.1" of each network that is up, without loopback.
std::vector<std::string> own_addresses();

/// "pid 4711 (python3)", of the processes that this user can see; empty where none of them listens on the port.
std::string listener_on(int port);

}  // namespace smp::runtime
