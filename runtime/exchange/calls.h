// Which call ranks are in: each tells those with whom it makes a call, so that two never take each other's messages for
// those of the same one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/transport/transport.h"

namespace smp::runtime {

/// One message for each call and pair of ranks, the name of the call; they are counted, so that the n-th call that one rank
/// makes with another is the n-th of the other with it. What follows of a call comes after hear(), on one of two ranks at
/// least: then this one ends the job, with both names, before anybody takes a byte of another call.
///
///   Calls calls(world);
///   calls.tell(1, "state_dict");
///   calls.hear(1, "state_dict, which waits for rank 1");   // throws c10::Error where rank 1 has told another name
class Calls {
 public:
  explicit Calls(std::shared_ptr<Transport> world);
  ~Calls();
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  /// The next call that this rank makes with world rank `partner` is `name`. Hears the one before it first, where that has
  /// not been heard, so nobody is two calls ahead of another.
  void tell(int partner, std::string_view name);
  /// Waits until `partner` has told that it is in the same call. action: for error texts. Throws c10::Error, and ends the
  /// job, where it is in another one; CommError after the time-out.
  void hear(int partner, std::string_view action);

 private:
  struct Peer;

  std::shared_ptr<Transport> world_;
  std::shared_ptr<std::vector<Peer>> peers_;  // by world rank
};

}  // namespace smp::runtime
