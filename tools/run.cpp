// `smp run`: builds mpirun's argument vector and runs it, without a shell in between.
#include "tools/run.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <initializer_list>
#include <iostream>
#include <optional>
#include <set>

#include "tools/hosts.h"
#include "tools/supervise.h"

namespace smp::tools {
namespace {

constexpr int kUsageError = 2;
constexpr int kExitPreempted = 75;  // smp/init.h
constexpr int kKilled = 137;        // by SIGKILL
constexpr int kTimedOut = 110;      // mpirun, whose --timeout is over
constexpr auto kHostLimit = std::chrono::seconds(10);

int num_physical_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  std::set<std::string> cores;  // hyperthreads of one core share one list of siblings
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::string siblings;
    cores.insert(std::getline(file, siblings) ? siblings : std::to_string(cpu));
  }
  return std::max<int>(1, static_cast<int>(cores.size()));
}

// The seccomp filters of some containers forbid it. Tried by a child on its parent, which is to it what one rank is to
// another.
bool may_read_memory_of_others() {
  static volatile char held = 1;
  const pid_t parent = getpid();
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // as Open MPI does, for Yama
  const pid_t child = fork();
  if (child == 0) {
    char copy = 0;
    iovec local = {&copy, 1}, remote = {const_cast<char*>(&held), 1};
    _exit(process_vm_readv(parent, &local, 1, &remote, 1, 0) == 1 ? 0 : 1);
  }
  int status = -1;
  const bool has_ended = child > 0 && waitpid(child, &status, 0) == child;
  prctl(PR_SET_PTRACER, 0);
  return has_ended && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

std::string quoted(const std::string& word) {
  constexpr auto kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@%";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

bool finds_other_hosts() {
  const char* slurm = getenv("SLURM_JOB_NUM_NODES");
  if (slurm != nullptr && std::string(slurm) != "1") return true;
  const auto are_set = {"PBS_NODEFILE", "LSB_HOSTS", "LSB_MCPU_HOSTS", "PE_HOSTFILE", "OMPI_MCA_orte_default_hostfile"};
  return std::any_of(are_set.begin(), are_set.end(), [](const char* name) { return getenv(name) != nullptr; });
}

int64_t memory_kills() {
  std::ifstream vmstat("/proc/vmstat");
  return num_memory_kills(vmstat);
}

void tell_of_memory_kills(int64_t number) {
  if (number <= 0) return;
  std::cerr
      << "smp run: while the job ran, the kernel has killed " << number
      << " processes of this host for want of memory, ranks that ended with 137 likely among them. Less is needed with more "
         "stages (pipeline_parallel_degree), more and smaller microbatches, or fewer of them at once (active_microbatches)."
      << std::endl;
}

// As many processes as hosts that answer have room for; nothing where that is too few.
std::optional<RunOptions> on_hosts_that_answer(const RunOptions& options) {
  const std::vector<Host> answering = hosts_that_answer(parse_hosts(options.hosts), kHostLimit);
  RunOptions left = options;
  left.hosts = to_text(answering);
  left.num_processes = std::min(options.num_processes, num_processes_of(answering));
  if (left.num_processes >= options.min_processes) return left;
  std::cerr << "smp run: expected hosts with " << options.min_processes << " processes to answer within "
            << kHostLimit.count() << " s, got " << (answering.empty() ? "none" : left.hosts) << " of " << options.hosts
            << std::endl;
  return std::nullopt;
}

}  // namespace

int64_t num_memory_kills(std::istream& vmstat) {
  int64_t number = 0;
  for (std::string name; vmstat >> name >> number;)
    if (name == "oom_kill") return number;
  return 0;
}

Machine this_machine() {
  return {.is_root = geteuid() == 0,
          .num_cores = num_physical_cores(),
          .allows_cross_memory = may_read_memory_of_others(),
          .has_other_hosts = finds_other_hosts()};
}

std::string Launch::shell_line() const {
  std::string line;
  for (const auto& variable : environment) {
    const auto value = quoted(variable.value);
    line += variable.name + "=" + (variable.if_unset ? "${" + variable.name + "-" + value + "}" : value) + " ";
  }
  for (const auto& argument : arguments) line += quoted(argument) + " ";
  line.pop_back();
  return line;
}

Launch plan_launch(const RunOptions& options, const Machine& machine) {
  Launch launch;
  // Several ranks share the cores: one thread each, unless the user says otherwise.
  launch.environment.push_back({"OMP_NUM_THREADS", "1", /*if_unset=*/true});
  // Tensors on huge pages, where the system leaves that to the program (/sys/kernel/mm/transparent_hugepage/enabled is
  // madvise): small pages cost a lookup in two tables for each miss in a virtual machine. glibc 2.35 and later.
  launch.environment.push_back({"GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", /*if_unset=*/true});
  // Copied once by their receiver, large messages need not wait for a sender that is within a long operator
  // (docs/decisions/large-messages.md). Where that is forbidden, Open MPI would print an error for each of them.
  const char* copies = machine.allows_cross_memory ? "cma" : "none";
  launch.environment.push_back({"OMPI_MCA_btl_vader_single_copy_mechanism", copies, /*if_unset=*/true});
  if (machine.is_root) {
    launch.environment.push_back({"OMPI_ALLOW_RUN_AS_ROOT", "1"});
    launch.environment.push_back({"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"});
  }
  const bool has_other_hosts = !options.hosts.empty() || !options.host_file.empty() || machine.has_other_hosts;
  // Binding would put all threads of a rank on one core. ob1 is what the MPI transport is tuned for, and a 4 KB payload with
  // its header misses the default eager limit.
  launch.arguments = {"mpirun", "-np", std::to_string(options.num_processes), "--bind-to", "none"};
  const auto add = [&](std::initializer_list<std::string> words) {
    launch.arguments.insert(launch.arguments.end(), words.begin(), words.end());
  };
  add({"--mca", "pml", "ob1", "--mca", "btl", has_other_hosts ? "self,vader,tcp" : "self,vader"});
  add({"--mca", "btl_vader_eager_limit", "16384"});
  // A request to stop is for ranks, not for what they have started, as workers that load data.
  add({"--mca", "odls_base_signal_direct_children_only", "1"});
  // On one host nothing of a job can be reached from another.
  if (!has_other_hosts) add({"--mca", "oob_tcp_if_include", "lo"});
  // A host that cannot be reached is missed within 15 s, by mpirun and by its daemons, which then end their ranks.
  if (has_other_hosts) {
    add({"--mca", "oob_tcp_keepalive_time", "5", "--mca", "oob_tcp_keepalive_intvl", "3"});
    add({"--mca", "oob_tcp_keepalive_probes", "3"});
  }
  if (has_other_hosts && !options.interface.empty()) {
    add({"--mca", "btl_tcp_if_include", options.interface, "--mca", "oob_tcp_if_include", options.interface});
  }
  if (!options.hosts.empty()) add({"--host", options.hosts});
  if (!options.host_file.empty()) add({"--hostfile", options.host_file});
  if (has_other_hosts) {  // mpirun hands its own variables OMPI_* on, and others that are named
    for (const auto& variable : launch.environment)
      if (!variable.name.starts_with("OMPI_")) add({"-x", variable.name});
    add({"-x", "SMP_RESTART_COUNT"});
    for (const char* name :
         {"SMP_CONFIG", "SM_HP_MP_PARAMETERS", "SMP_TRUSTED_CHECKPOINTS", "PATH", "PYTHONPATH", "LD_LIBRARY_PATH"})
      if (getenv(name) != nullptr) add({"-x", name});
  }
  if (!options.log_dir.empty()) add({"--output-filename", options.log_dir + ":nojobid"});
  if (options.tag_output) add({"--tag-output"});
  if (options.num_processes > machine.num_cores && !has_other_hosts) add({"--oversubscribe"});
  if (options.timeout_s > 0) {
    launch.arguments.insert(launch.arguments.end(), {"--timeout", std::to_string(options.timeout_s)});
  }
  if (options.program.front().ends_with(".py")) launch.arguments.push_back("python3");  // of PATH, as an environment sets it
  launch.arguments.insert(launch.arguments.end(), options.program.begin(), options.program.end());
  return launch;
}

int run(const RunOptions& options) {
  const Machine machine = this_machine();
  Launch launch = plan_launch(options, machine);
  std::cerr << "smp run: " << launch.shell_line() << std::endl;
  if (options.dry_run) return 0;
  for (const auto& variable : launch.environment) {
    setenv(variable.name.c_str(), variable.value.c_str(), /*overwrite=*/!variable.if_unset);
  }
  Supervisor supervisor{std::chrono::seconds(options.grace_s)};
  for (int num_restarts = 0;; ++num_restarts) {
    setenv("SMP_RESTART_COUNT", std::to_string(num_restarts).c_str(), /*overwrite=*/1);
    int code = kUsageError;
    const int64_t kills_before = memory_kills();
    try {
      code = supervisor.run(launch.arguments);
    } catch (const NotStarted& error) {
      std::cerr << "smp run: expected Open MPI's mpirun in PATH, got: " << error.code().message()
                << ". Install it (Debian: openmpi-bin), or run the program alone, on one process: "
                << quoted(options.program[0]) << std::endl;
    }
    if (code == kKilled) tell_of_memory_kills(memory_kills() - kills_before);
    const bool is_over = code == 0 || code == kUsageError || code == kExitPreempted ||
                         num_restarts == options.max_restarts || (code == kTimedOut && options.timeout_s > 0);
    if (supervisor.is_stopping() || is_over) return code;
    std::cerr << "smp run: the job has ended with " << code << "; restart " << num_restarts + 1 << " of "
              << options.max_restarts << std::endl;
    RunOptions next = options;
    if (options.min_processes > 0) {
      const std::optional<RunOptions> left = on_hosts_that_answer(options);
      if (!left && !supervisor.is_stopping()) return code;
      if (left && left->num_processes < options.num_processes)
        std::cerr << "smp run: it goes on with " << left->num_processes << " processes, on " << left->hosts << std::endl;
      if (left) next = *left;
    }
    if (!options.log_dir.empty()) next.log_dir += "/restart_" + std::to_string(num_restarts + 1);  // beside what failed
    launch = plan_launch(next, machine);
    if (supervisor.is_stopping()) return kExitPreempted;  // there is nothing yet that could be asked
  }
}

}  // namespace smp::tools
