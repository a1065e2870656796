// Owns the hosts of a job: what the command line says of them, and which of them can be reached.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace smp::tools {

struct Host {
  std::string name;
  int num_processes = 1;
};

/// "a:4,b:4", of mpirun's form: a host without a number runs one process. Throws std::invalid_argument.
std::vector<Host> parse_hosts(const std::string& text);
std::string to_text(const std::vector<Host>& hosts);
int num_processes_of(const std::vector<Host>& hosts);

/// Those on which mpirun's remote shell (OMPI_MCA_plm_rsh_agent, or ssh) runs `true` within `limit`, in their order. The
/// host of this process is one of them. The shell's own complaints go to stderr; it has no terminal to ask for a password
/// on.
std::vector<Host> hosts_that_answer(const std::vector<Host>& hosts, std::chrono::milliseconds limit);

}  // namespace smp::tools
