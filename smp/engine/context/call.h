// Calls that ranks make together, from their first message to their last.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "runtime/device/device.h"
#include "runtime/placement/topology.h"
#include "runtime/transport/error.h"
#include "smp/engine/context/context.h"

namespace smp::engine {

/// Whom this rank makes a step with: its pipeline, the leader first, and its replicas.
std::vector<int> ranks_of_step(const Context& context);

/// This rank is in the call `name` with `ranks` of the world, its own among them or not. The name is the same on all of
/// them, in whatever language they call it. Waits for none of them.
void tell_call(Context& context, std::string_view name, const std::vector<int>& ranks);

/// Waits until they are in that call as well. Throws c10::Error, and ends the job, where one of them is in another.
void hear_call(Context& context, std::string_view name, const std::vector<int>& ranks);

/// The first text of a rank that is not empty, on every rank. Collective over the world.
std::string first_complaint(const std::string& own, const Context& context);

/// The first `most` of `items` in quotes, and how many more there are.
std::string listed(const std::vector<std::string>& items, size_t most = 20);

/// With the call that failed.
CommError failed_call(std::string_view name, const std::vector<int>& ranks, const CommError& error);

/// While it lives, this rank is in the call `name`, for those that ask what it is doing.
class InCall {
 public:
  InCall(Context& context, std::string_view name) : context_(context), outer_(std::exchange(context.call, name)) {}
  ~InCall() {
    context_.call = outer_;
    if (outer_.empty()) context_.in_calls_ns += runtime::host().now_ns() - begun_ns_;
  }
  InCall(const InCall&) = delete;
  InCall& operator=(const InCall&) = delete;

 private:
  Context& context_;
  std::string_view outer_;
  int64_t begun_ns_ = runtime::host().now_ns();
};

/// What fn() returns. A wait that takes too long names the call and its ranks.
template <class Fn>
decltype(auto) naming_call(std::string_view name, const std::vector<int>& ranks, const Fn& fn) {
  try {
    return fn();
  } catch (const AbortedError&) {
    throw;
  } catch (const PeerLostError&) {
    throw;
  } catch (const HangError& error) {
    throw HangError(failed_call(name, ranks, error).what(), error.lines());
  } catch (const CommError& error) {
    throw failed_call(name, ranks, error);
  }
}

/// What fn() returns, once all of `ranks` are in the call `name`. All calls begin so, but steps, and wait for longer than
/// these: what another rank does before it comes (an evaluation, a download), or in the call (a write), takes its time.
template <class Fn>
decltype(auto) in_call(Context& context, std::string_view name, const std::vector<int>& ranks, const Fn& fn) {
  const InCall scope(context, name);
  const LongWaits waits(context);
  tell_call(context, name, ranks);
  hear_call(context, name, ranks);
  return naming_call(name, ranks, fn);
}
template <class Fn>
decltype(auto) in_call(Context& context, std::string_view name, runtime::GroupKind kind, const Fn& fn) {
  return in_call(context, name, context.topology.group(kind, context.world->rank()), fn);
}

}  // namespace smp::engine
