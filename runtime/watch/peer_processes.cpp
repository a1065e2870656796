// Owns the reading of /proc.
#include "runtime/watch/peer_processes.h"

#include <c10/util/Exception.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <sstream>
#include <string_view>

namespace smp::runtime {
namespace {

struct ProcessState {
  char letter = 0;
  int64_t start_ticks = 0;
};

// Field 3 and field 22 of /proc/<pid>/stat; field 2, the name, may hold blanks and parentheses.
std::optional<ProcessState> state_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  std::string text;
  std::getline(file, text, '\0');  // empty where the process ends meanwhile; iterators of the buffer would throw
  const size_t end_of_name = text.rfind(')');
  if (end_of_name == std::string::npos) return std::nullopt;
  std::istringstream fields(text.substr(end_of_name + 1));
  ProcessState state;
  fields >> state.letter;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  if (!(fields >> state.start_ticks)) return std::nullopt;
  return state;
}

bool is_same_host(const ProcessIdentity& a, const ProcessIdentity& b) {
  return a.host == b.host && a.boot == b.boot && a.pid_namespace == b.pid_namespace;
}

}  // namespace

std::string ProcessIdentity::text() const { return "pid " + std::to_string(pid) + " on host " + host; }

std::string ProcessIdentity::serialised() const {
  return host + "\n" + boot + "\n" + pid_namespace + "\n" + std::to_string(pid) + "\n" + std::to_string(start_ticks);
}

ProcessIdentity ProcessIdentity::parse(const std::string& text) {
  ProcessIdentity process;
  std::istringstream lines(text);
  std::getline(lines, process.host);
  std::getline(lines, process.boot);
  std::getline(lines, process.pid_namespace);
  lines >> process.pid >> process.start_ticks;
  TORCH_CHECK_VALUE(lines && lines.eof(), "process identity: expected host, boot, pid namespace, ",
                    "pid and start time on five lines, got '", text, "'.");
  return process;
}

ProcessIdentity this_process() {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string boot;
  std::ifstream boot_file("/proc/sys/kernel/random/boot_id");
  std::getline(boot_file, boot);
  std::array<char, 64> name_space{};
  // Where it cannot be read it stays empty for all, and the host's name alone decides.
  [[maybe_unused]] const ssize_t length = readlink("/proc/self/ns/pid", name_space.data(), name_space.size() - 1);
  const auto state = state_of("self");
  return {host.data(), boot, name_space.data(), getpid(), state ? state->start_ticks : 0};
}

namespace {

// A letter of the host's, 0 where the process is gone; nothing where this process cannot tell.
std::optional<char> letter_of(const ProcessIdentity& process) {
  static const ProcessIdentity me = this_process();
  if (me.start_ticks == 0 || !is_same_host(process, me)) return std::nullopt;
  const auto state = state_of(std::to_string(process.pid));
  return state && state->start_ticks == process.start_ticks ? state->letter : '\0';
}

}  // namespace

bool is_running(const ProcessIdentity& process) {
  const std::optional<char> letter = letter_of(process);
  return !letter || (*letter != 0 && *letter != 'Z' && *letter != 'X');
}

PeerProcesses::PeerProcesses(int my_rank, const std::vector<std::string>& identities) {
  for (const std::string& identity : identities) processes_.push_back(ProcessIdentity::parse(identity));
  const ProcessIdentity& me = processes_[static_cast<size_t>(my_rank)];
  for (size_t rank = 0; rank < processes_.size(); ++rank)
    if (static_cast<int>(rank) != my_rank && is_same_host(processes_[rank], me))
      local_peers_.push_back(static_cast<int>(rank));
}

std::optional<int> PeerProcesses::first_lost() const {
  const auto lost = std::find_if(local_peers_.begin(), local_peers_.end(),
                                 [&](int rank) { return !is_running(processes_[static_cast<size_t>(rank)]); });
  if (lost == local_peers_.end()) return std::nullopt;
  return *lost;
}

bool PeerProcesses::is_rank_running(int rank) const { return is_running(processes_[static_cast<size_t>(rank)]); }

bool PeerProcesses::is_of_this_host(int rank) const { return letter_of(processes_[static_cast<size_t>(rank)]).has_value(); }

bool PeerProcesses::is_rank_there(int rank) const { return letter_of(processes_[static_cast<size_t>(rank)]) != '\0'; }

std::string PeerProcesses::seen_of(int rank) const {
  const std::optional<char> letter = letter_of(processes_[static_cast<size_t>(rank)]);
  if (!letter) return "it is on another host";
  switch (*letter) {
    case 0:
    case 'X':
    case 'Z':
      return "it has ended";
    case 'T':
    case 't':
      return "it is stopped, by a signal or a debugger";
    case 'R':
      return "it computes, in an operator or in the program's own code";
    default:
      return "it waits for something else, in the program's own code";
  }
}

bool PeerProcesses::are_of_one_host(int rank, int other) const {
  return is_same_host(processes_[static_cast<size_t>(rank)], processes_[static_cast<size_t>(other)]);
}

std::optional<StackQuestion> PeerProcesses::ask_for_stack(int rank) const {
  const ProcessIdentity& process = processes_[static_cast<size_t>(rank)];
  const std::optional<char> letter = letter_of(process);
  if (!letter || std::string_view("\0TtXZ", 5).find(*letter) != std::string_view::npos) return std::nullopt;
  return StackQuestion(static_cast<pid_t>(process.pid));
}

std::string PeerProcesses::name_of(int rank) const {
  const ProcessIdentity& process = processes_[static_cast<size_t>(rank)];
  return "rank " + std::to_string(rank) + " (" + process.text() + ")";
}

}  // namespace smp::runtime
