// Owns the transport of ranks that are threads of one process.
#pragma once

#include <chrono>
#include <memory>

#include "runtime/transport/transport.h"

namespace smp::runtime {

class LoopbackHub;

/// `size` ranks in one process, stricter than any network: a send completes only when it is
/// received, a world in which every rank waits fails at once and says what each waits for, and
/// close() refuses messages that nobody took.
///
///   LoopbackWorld world(2);
///   std::thread peer([&] { run(*world.transport(1)); });   // tests: run_ranks in tests/support
class LoopbackWorld {
 public:
  explicit LoopbackWorld(int size, std::chrono::milliseconds timeout = kDefaultTimeout);
  ~LoopbackWorld();
  LoopbackWorld(const LoopbackWorld&) = delete;
  LoopbackWorld& operator=(const LoopbackWorld&) = delete;

  /// What rank `rank` communicates with; call once per rank. It may outlive the world.
  std::shared_ptr<Transport> transport(int rank) const;
  /// Says that `rank` has finished: who still waits for it waits in vain, and is told so.
  void leave(int rank);
  /// Call when all ranks have finished. Throws CommError naming each message that nobody took.
  void close();

 private:
  int size_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<LoopbackHub> hub_;
};

}  // namespace smp::runtime
