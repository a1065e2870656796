// What a device does beside the rest of a thread's work.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

namespace smp::runtime {

/// A CUDA stream. Memory that is allocated on it, also by tensors, is used again by it alone, in its order.
class DeviceLane {
 public:
  virtual ~DeviceLane() = default;
  /// What this thread gives the device until leave() is done in the lane's own order; events order it with the rest.
  virtual void enter() = 0;
  virtual void leave() noexcept = 0;
  /// On it: the rest goes on behind what the lane has been given so far.
  virtual void join() = 0;
  /// On it: the rest may use `memory`, allocated on the lane, behind join(). Freed, it is used again behind what the rest
  /// has been given until then, too.
  virtual void share(const c10::Storage& memory) = 0;
};

/// On `lane` while it lives; null: nowhere else.
class OnLane {
 public:
  explicit OnLane(DeviceLane* lane) : lane_(lane) {
    if (lane_ != nullptr) lane_->enter();
  }
  ~OnLane() {
    if (lane_ != nullptr) lane_->leave();
  }
  OnLane(const OnLane&) = delete;
  OnLane& operator=(const OnLane&) = delete;

 private:
  DeviceLane* lane_;
};

/// At its end, also by an exception, the rest goes on behind what `lane` has been given; null: nothing to do.
class JoinAtEnd {
 public:
  explicit JoinAtEnd(DeviceLane* lane) : lane_(lane) {}
  ~JoinAtEnd() {
    try {
      if (lane_ != nullptr) lane_->join();
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): a device that has failed; whoever uses it next hears why
    }
  }
  JoinAtEnd(const JoinAtEnd&) = delete;
  JoinAtEnd& operator=(const JoinAtEnd&) = delete;

 private:
  DeviceLane* lane_;
};

}  // namespace smp::runtime
