// One loop over signals, and what Open MPI leaves where it is killed.
#include "tools/supervise.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

namespace smp::tools {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr auto kTermLimit = std::chrono::seconds(5);
constexpr auto kKillLimit = std::chrono::seconds(10);  // for processes that a file system holds
constexpr int kLooks = 10;                             // in the time in which a program counts as stuck
constexpr auto kPollInterval = std::chrono::milliseconds(20);

[[noreturn]] void throw_errno(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

// As SIGHUP under nohup.
bool is_ignored(int signal) {
  struct sigaction present{};
  sigaction(signal, nullptr, &present);
  return (present.sa_flags & SA_SIGINFO) == 0 && present.sa_handler == SIG_IGN;
}

}  // namespace

// Signals that are read from a descriptor while it lives, in place of handlers.
class Signals {
 public:
  Signals() {
    signal(SIGCHLD, SIG_DFL);  // where it is ignored, children end without a status
    sigset_t wanted;
    sigemptyset(&wanted);
    for (const int signal : {SIGCHLD, SIGTERM, SIGHUP, SIGINT, SIGUSR1, SIGUSR2}) {
      if (!is_ignored(signal)) sigaddset(&wanted, signal);
    }
    sigprocmask(SIG_BLOCK, &wanted, &before_);
    descriptor_ = signalfd(-1, &wanted, SFD_CLOEXEC | SFD_NONBLOCK);
    if (descriptor_ < 0) throw_errno("signalfd");
  }
  // They stay blocked: none that comes now is to end this process with another code than its job's.
  ~Signals() { close(descriptor_); }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  const sigset_t& before() const { return before_; }
  /// The next one, within `limit`.
  std::optional<signalfd_siginfo> next(std::chrono::milliseconds limit) const {
    pollfd waiting{descriptor_, POLLIN, 0};
    poll(&waiting, 1, static_cast<int>(limit.count()));
    signalfd_siginfo info;
    if (read(descriptor_, &info, sizeof info) != sizeof info) return std::nullopt;
    return info;
  }

 private:
  sigset_t before_;
  int descriptor_ = -1;
};

namespace {

// A child that is `arguments`, or the error of its exec.
pid_t start(const std::vector<std::string>& arguments, bool is_group, const sigset_t& mask) {
  std::vector<char*> argv;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  int error_pipe[2];
  if (pipe2(error_pipe, O_CLOEXEC) != 0) throw_errno("pipe");
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child < 0) throw_errno("fork");
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent) _exit(1);
    if (is_group) setpgid(0, 0);
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    execvp(argv[0], argv.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = write(error_pipe[1], &error, sizeof error);
    _exit(127);
  }
  close(error_pipe[1]);
  int error = 0;
  const bool has_failed = read(error_pipe[0], &error, sizeof error) == sizeof error;
  close(error_pipe[0]);
  if (!has_failed) return child;
  waitpid(child, nullptr, 0);
  throw NotStarted(error, std::generic_category(), arguments[0]);
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> entries;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    entries.push_back(at->path());
  return entries;
}

struct Process {
  pid_t parent, id;
  bool has_ended;  // and its parent has not fetched its status
  auto operator<=>(const Process&) const = default;
};

// By parent: state and parent are fields 3 and 4 of /proc/<pid>/stat, behind the name in parentheses.
std::set<Process> processes() {
  std::set<Process> found;
  for (const fs::path& process : entries_of("/proc")) {
    const std::string name = process.filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(process / "stat");
    std::string text;
    std::getline(file, text, '\0');
    const size_t end_of_name = text.rfind(") ");
    if (end_of_name == std::string::npos) continue;
    found.insert({std::stoi(text.substr(end_of_name + 4)), std::stoi(name), text[end_of_name + 2] == 'Z'});
  }
  return found;
}

// Of this process, without `left_out` and theirs, and without those that have ended.
std::set<pid_t> descendants(const std::set<pid_t>& left_out, const std::set<Process>& all = processes()) {
  std::set<pid_t> found;
  std::vector<pid_t> parents{getpid()};
  while (!parents.empty()) {
    const pid_t parent = parents.back();
    parents.pop_back();
    for (auto child = all.lower_bound({parent, 0, false}); child != all.end() && child->parent == parent; ++child) {
      if (child->has_ended || left_out.contains(child->id)) continue;
      if (found.insert(child->id).second) parents.push_back(child->id);
    }
  }
  return found;
}

void signal_all(const std::set<pid_t>& processes, int signal) {
  for (const pid_t process : processes) kill(process, signal);
}

void reap() {
  while (waitpid(-1, nullptr, WNOHANG) > 0) continue;
}

// mpirun removes what is in both places itself, unless it is killed. The first number of its contact is that of the job,
// whose upper half the names of its ranks' memory have: vader_segment.HOST.USER.JOB.RANK.
void remove_files(pid_t mpirun) {
  std::error_code ignored;
  const std::string user = "." + std::to_string(getuid());
  for (const fs::path& folder : entries_of(fs::temp_directory_path(ignored))) {
    const std::string name = folder.filename();
    const fs::path session = folder / ("pid." + std::to_string(mpirun));
    struct stat own{};
    const bool is_ours = lstat(folder.c_str(), &own) == 0 && S_ISDIR(own.st_mode) && own.st_uid == getuid();
    if (!is_ours || !name.starts_with("ompi.") || !name.ends_with(user)) continue;
    uint64_t job = 0;
    if (!(std::ifstream(session / "contact.txt") >> job)) continue;
    std::ostringstream half;
    half << user << "." << std::hex << (job >> 16);
    for (const fs::path& segment : entries_of("/dev/shm")) {
      const std::string segment_name = segment.filename();
      const bool is_of_job = segment_name.find(half.str()) != std::string::npos;
      if (segment_name.starts_with("vader_segment.") && is_of_job) fs::remove(segment, ignored);
    }
    fs::remove_all(session, ignored);
  }
}

bool has_unfetched_child(const std::set<Process>& all, pid_t parent) {
  return std::any_of(all.begin(), all.end(), [&](auto& each) { return each.parent == parent && each.has_ended; });
}

// Whoever reads what it prints does not: mpirun looks after nothing while it waits for him.
bool is_output_held_up() {
  pollfd outputs[] = {{STDOUT_FILENO, POLLOUT, 0}, {STDERR_FILENO, POLLOUT, 0}};
  return poll(outputs, std::size(outputs), 0) < static_cast<int>(std::size(outputs));
}

}  // namespace

Supervisor::Supervisor(std::chrono::seconds grace, std::chrono::milliseconds stuck_limit)
    : signals_(std::make_unique<const Signals>()),
      grace_(grace),
      stuck_limit_(stuck_limit),
      not_of_the_job_(descendants({})) {}

Supervisor::~Supervisor() = default;

bool Supervisor::is_stopping() {
  while (const auto late = signals_->next(std::chrono::milliseconds(0))) {
    is_stopping_ = is_stopping_ || (late->ssi_signo != SIGCHLD && late->ssi_signo != SIGUSR2);
  }
  return is_stopping_;
}

// Nothing lives but the program, which does not fetch the status of a child: where mpirun goes on for ranks elsewhere, it
// has.
bool Supervisor::is_stuck(pid_t program) const {
  const std::set<Process> all = processes();
  const bool is_alone = descendants(not_of_the_job_, all) == std::set{program};
  return is_alone && has_unfetched_child(all, program) && !is_output_held_up();
}

// What has lost its parent is this process's child.
void Supervisor::end_those_left() const {
  const auto start = Clock::now();
  for (int signal = SIGTERM; Clock::now() - start < kTermLimit + kKillLimit;) {
    reap();
    const std::set<Process> all = processes();
    const std::set<pid_t> left = descendants(not_of_the_job_, all);
    if (left.empty() && !has_unfetched_child(all, getpid())) return;  // its threads may take longer to end
    signal_all(left, signal);
    signal = Clock::now() - start < kTermLimit ? 0 : SIGKILL;
    std::this_thread::sleep_for(kPollInterval);
  }
  std::cerr << "smp run: processes of the job do not end:";
  for (const pid_t process : descendants(not_of_the_job_)) std::cerr << " " << process;
  std::cerr << std::endl;
}

int Supervisor::run(const std::vector<std::string>& arguments) {
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const bool is_group = isatty(STDIN_FILENO) == 0;
  const pid_t program = start(arguments, is_group, signals_->before());
  auto next_deadline = Clock::time_point::max();
  int next_signal = SIGTERM;
  auto next_look = Clock::now();
  auto stuck_since = Clock::time_point::max();
  std::optional<int> status;
  while (!status) {
    const auto now = Clock::now();
    if (now >= next_look) {
      next_look = now + stuck_limit_ / kLooks;
      if (!is_stuck(program))
        stuck_since = Clock::time_point::max();
      else if (stuck_since > now)
        stuck_since = now;
      else if (now - stuck_since >= stuck_limit_) {
        std::cerr << "smp run: " << arguments[0] << " does not end though all that it has started has: killed" << std::endl;
        kill(program, SIGKILL);
      }
    }
    if (now >= next_deadline) {
      next_signal == SIGTERM ? void(kill(program, SIGTERM)) : signal_all(descendants(not_of_the_job_), SIGKILL);
      next_deadline = now + kTermLimit;
      next_signal = SIGKILL;
    }
    const auto info = signals_->next(std::chrono::milliseconds(100));
    if (!info) continue;
    switch (static_cast<int>(info->ssi_signo)) {
      case SIGCHLD: {
        int ended = 0;
        for (pid_t child; (child = waitpid(-1, &ended, WNOHANG)) > 0;)
          if (child == program) status = ended;
        break;
      }
      case SIGTERM:
      case SIGHUP:
        if (std::exchange(is_stopping_, true)) {
          next_deadline = now;
        } else {
          kill(program, SIGUSR1);
          next_deadline = now + grace_;
        }
        break;
      case SIGINT:
        is_stopping_ = true;
        if (is_group || info->ssi_code != SI_KERNEL) kill(program, SIGINT);  // else it has reached both
        break;
      case SIGUSR1:
        is_stopping_ = true;
        kill(program, SIGUSR1);
        break;
      default:
        kill(program, static_cast<int>(info->ssi_signo));
    }
  }
  end_those_left();
  if (WIFSIGNALED(*status)) remove_files(program);
  return WIFEXITED(*status) ? WEXITSTATUS(*status) : 128 + WTERMSIG(*status);
}

}  // namespace smp::tools
