// Owns how the ranks of a world find each other over a store of keys, and connect by sockets.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "runtime/transport/socket_link.h"

namespace c10d {
class Store;
}

namespace smp::runtime::sockets {

/// This rank's connections with all others, and who they are.
struct Meeting {
  int rank = 0;
  int num_local_ranks = 1;              ///< of this host, itself included
  std::vector<std::string> identities;  ///< ProcessIdentity::serialised, by rank
  std::vector<Descriptor> messages{};   ///< by rank; none to itself
  std::vector<Descriptor> notices{};    ///< by rank
};

/// Who a rank is before it has met the others.
struct Newcomer {
  int rank = 0;
  int size = 1;
  int num_local_ranks = 1;
  /// An address of this host that the others reach; empty where all ranks are on one host. Then they meet by sockets of
  /// Unix, and no port is opened.
  std::string host{};
};

/// Connects every rank with every other. Collective: each rank writes where it listens to `store`, with a secret that those
/// who connect must know. Throws CommError when another rank has not come after `timeout`, and names it.
Meeting meet(c10d::Store& store, const Newcomer& self, std::chrono::milliseconds timeout);

}  // namespace smp::runtime::sockets
