// One child reads what the other holds.
#include "runtime/launch/cross_memory.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

namespace smp::runtime {
namespace {

constexpr int kAllowed = 0, kForbidden = 1, kUnknown = 2;

/// A child that runs `body`, which may only call what is safe after a fork, and is gone when this is destroyed.
class Child {
 public:
  template <class Body>
  explicit Child(Body body) : pid_(fork()) {
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    _exit(body());
  }
  ~Child() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    wait();
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  /// What its body has returned; kUnknown where it was not started, or somebody else (a handler of SIGCHLD) knows.
  int result() {
    const int status = pid_ > 0 ? wait() : -1;
    pid_ = -1;
    return status >= 0 && WIFEXITED(status) ? WEXITSTATUS(status) : kUnknown;
  }

 private:
  int wait() const {
    int status = 0;
    pid_t ended = 0;
    do ended = waitpid(pid_, &status, 0);
    while (ended < 0 && errno == EINTR);
    return ended == pid_ ? status : -1;
  }

  pid_t pid_;
};

}  // namespace

bool is_cross_memory_forbidden() {
  static volatile char held = 1;
  const Child holder([] {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // as Open MPI does, for Yama
    for (;;) pause();
    return kUnknown;
  });
  if (holder.pid() < 0) return false;
  Child reader([&holder] {
    char copy = 0;
    iovec local = {&copy, 1}, remote = {const_cast<char*>(&held), 1};
    if (process_vm_readv(holder.pid(), &local, 1, &remote, 1, 0) == 1) return kAllowed;
    return errno == EPERM || errno == EACCES || errno == ENOSYS ? kForbidden : kUnknown;
  });
  return reader.result() == kForbidden;
}

}  // namespace smp::runtime
