// One remote shell for each host, all at once.
#include "tools/hosts.h"

#include <fcntl.h>
#include <netdb.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <charconv>
#include <csignal>
#include <cstdlib>
#include <set>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace smp::tools {
namespace {

using Clock = std::chrono::steady_clock;

constexpr pid_t kNobody = -1;  // is asked of this host
constexpr auto kAskInterval = std::chrono::milliseconds(20);

bool is_installed(const std::string& program) {
  if (program.find('/') != std::string::npos) return access(program.c_str(), X_OK) == 0;
  const char* path = getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (access((folder + "/" + program).c_str(), X_OK) == 0) return true;
  return false;
}

// mpirun's is a list, "ssh -F conf : rsh", of which it takes the first that is installed.
std::vector<std::string> remote_shell() {
  const char* chosen = getenv("OMPI_MCA_plm_rsh_agent");
  std::istringstream agents(chosen == nullptr ? "ssh:rsh" : chosen);
  for (std::string agent; std::getline(agents, agent, ':');) {
    std::istringstream words(agent);
    std::vector<std::string> shell;
    for (std::string word; words >> word;) shell.push_back(word);
    if (!shell.empty() && is_installed(shell[0])) return shell;
  }
  return {"ssh"};
}

// Only an address of one's own can be bound.
bool is_this_host(const std::string& name) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return false;
  bool is_own = false;
  for (const addrinfo* each = found; each != nullptr && !is_own; each = each->ai_next) {
    const int probe = socket(each->ai_family, each->ai_socktype | SOCK_CLOEXEC, 0);
    is_own = probe >= 0 && bind(probe, each->ai_addr, each->ai_addrlen) == 0;
    if (probe >= 0) close(probe);
  }
  freeaddrinfo(found);
  return is_own;
}

// A session of its own, with the signals of a new program. 0 where it cannot be started.
pid_t spawn(const std::vector<std::string>& arguments) {
  std::vector<char*> argv;
  for (const auto& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK);
  pid_t process = 0;
  if (posix_spawnp(&process, argv[0], &files, &attributes, argv.data(), environ) != 0) process = 0;
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  return process;
}

// Of a process, until `deadline`; then it is killed with all that it has started.
bool has_succeeded(pid_t process, Clock::time_point deadline) {
  int status = 0;
  pid_t ended = 0;
  while ((ended = waitpid(process, &status, WNOHANG)) == 0 && Clock::now() < deadline)
    std::this_thread::sleep_for(kAskInterval);
  if (ended == 0) {
    kill(-process, SIGKILL);
    waitpid(process, nullptr, 0);
  }
  return ended == process && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

std::vector<Host> parse_hosts(const std::string& text) {
  const auto refuse = [&] {
    throw std::invalid_argument("expected hosts and processes of each, as in a:4,b:4, got '" + text + "'");
  };
  std::vector<Host> hosts;
  std::set<std::string> names;
  std::istringstream words(text + ",");
  for (std::string word; std::getline(words, word, ',');) {
    Host host{.name = word.substr(0, word.find(':'))};
    if (host.name.size() < word.size()) {
      const char* const end = word.data() + word.size();
      const auto read = std::from_chars(word.data() + host.name.size() + 1, end, host.num_processes);
      if (read.ec != std::errc() || read.ptr != end || host.num_processes < 1) refuse();
    }
    if (host.name.empty() || host.name.front() == '-' || !names.insert(host.name).second) refuse();
    hosts.push_back(host);
  }
  return hosts;
}

std::string to_text(const std::vector<Host>& hosts) {
  std::string text;
  for (const Host& host : hosts) text += (text.empty() ? "" : ",") + host.name + ":" + std::to_string(host.num_processes);
  return text;
}

int num_processes_of(const std::vector<Host>& hosts) {
  int sum = 0;
  for (const Host& host : hosts) sum += host.num_processes;
  return sum;
}

std::vector<Host> hosts_that_answer(const std::vector<Host>& hosts, std::chrono::milliseconds limit) {
  const std::vector<std::string> shell = remote_shell();
  std::vector<pid_t> asked;
  for (const Host& host : hosts) {
    std::vector<std::string> arguments = shell;
    arguments.insert(arguments.end(), {host.name, "true"});
    asked.push_back(is_this_host(host.name) ? kNobody : spawn(arguments));
  }
  const auto deadline = Clock::now() + limit;
  std::vector<Host> answering;
  for (size_t i = 0; i < hosts.size(); ++i) {
    const bool answers = asked[i] == kNobody || (asked[i] > 0 && has_succeeded(asked[i], deadline));
    if (answers) answering.push_back(hosts[i]);
  }
  return answering;
}

}  // namespace smp::tools
