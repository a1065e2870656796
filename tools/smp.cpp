// The program smp: parses the command line; each subcommand lives in its own file.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "tools/hosts.h"
#include "tools/run.h"

namespace {

constexpr int kUsageError = 2;

// Whose values could be taken for the program.
constexpr std::string_view kOptionsWithWords[] = {"--hosts", "--hostfile", "--interface", "--log-dir"};

bool is_subcommand(const std::string& word) { return word == "run" || word == "doctor" || word == "selftest"; }

// CLI11 knows no "-np", the option mpirun users have in their fingers, and no "--" before a
// program. Only our own arguments are translated, never the program's.
void translate_own_arguments(std::vector<std::string>& arguments) {
  for (auto argument = arguments.begin(); argument != arguments.end(); ++argument) {
    const bool has_word =
        std::find(std::begin(kOptionsWithWords), std::end(kOptionsWithWords), *argument) != std::end(kOptionsWithWords);
    if (has_word && argument + 1 != arguments.end()) {
      ++argument;
      continue;
    }
    if (*argument == "--") {
      arguments.erase(argument);
      return;
    }
    if (*argument == "-np") *argument = "--np";
    const bool is_number = argument->find_first_not_of("0123456789") == std::string::npos;
    if (!is_subcommand(*argument) && argument->rfind('-', 0) != 0 && !is_number) return;
  }
}

void check_min_processes(const smp::tools::RunOptions& options) {
  try {
    const int most = std::min(options.num_processes, num_processes_of(smp::tools::parse_hosts(options.hosts)));
    if (options.min_processes > most) {
      throw CLI::ValidationError("--min-np", "expected at most the " + std::to_string(most) +
                                                 " processes of all hosts, got " + std::to_string(options.min_processes));
    }
  } catch (const std::invalid_argument& error) {
    throw CLI::ValidationError("--hosts", error.what());
  }
  for (const char* allocation : {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"}) {
    if (getenv(allocation) == nullptr) continue;
    throw CLI::ValidationError("--min-np",
                               "expected hosts that mpirun reaches by ssh, which can be asked, got an allocation (" +
                                   std::string(allocation) + "), whose scheduler starts it");
  }
}

// Of every subcommand that starts ranks. Returns --hosts.
CLI::Option* add_ranks(CLI::App& app, smp::tools::RunOptions& options) {
  app.add_option("--np,-n", options.num_processes, "Processes (also: -np)")->required()->check(CLI::Range(1, 65536));
  app.add_option("--timeout", options.timeout_s, "End the job so many seconds after a start")->check(CLI::Range(1, 1 << 30));
  auto* hosts = app.add_option("--hosts", options.hosts, "Hosts and processes of each, by ssh: a:4,b:4");
  app.add_option("--hostfile", options.host_file, "A file of them, of mpirun's form")->excludes(hosts);
  app.add_option("--interface", options.interface, "Network between the hosts: eth0, or 10.0.0.0/16");
  app.add_flag("--dry-run", options.dry_run, "Print the line that would run, and stop");
  return hosts;
}

// A program that lies beside this one, on every rank.
void add_check(CLI::App& app, smp::tools::RunOptions& options, const std::string& name, const std::string& meaning) {
  auto* check = app.add_subcommand(name, meaning);
  add_ranks(*check, options);
  check->callback([&options, name] {
    const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / ("smp_" + name);
    if (!std::filesystem::exists(program)) {
      throw CLI::ValidationError(name, "expected the program '" + program.string() +
                                           "', got none. `make build` makes it; in "
                                           "Python smp.doctor() says what a job runs on");
    }
    options.program = {program};
  });
}

void add_run(CLI::App& app, smp::tools::RunOptions& options) {
  auto* run = app.add_subcommand("run", "Start a program on several processes of this machine, with the right mpirun flags");
  auto* hosts = add_ranks(*run, options);
  auto* restarts = run->add_option("--max-restarts", options.max_restarts, "Start a job that fails again, so often")
                       ->check(CLI::Range(0, 1 << 30));
  run->add_option("--min-np", options.min_processes,
                  "At a restart, go on without hosts that do not answer, with so many processes at least")
      ->check(CLI::Range(1, 65536))
      ->needs(hosts)
      ->needs(restarts);
  run->add_option("--grace", options.grace_s, "Seconds for a save after SIGTERM (30)")->check(CLI::Range(0, 1 << 20));
  run->add_option("--log-dir", options.log_dir, "A folder for what each rank prints");
  run->add_flag("--tag-output", options.tag_output, "Say of each line which rank has printed it");
  run->footer("Usage: smp run -np N [options] program [arguments ...]");
  run->prefix_command();
  run->callback([run, &options] {
    options.program = run->remaining();
    if (options.program.empty() || options.program[0].empty()) {
      throw CLI::ValidationError("program", "expected a program to run, got none");
    }
    if (options.min_processes > 0) check_min_processes(options);
    if (options.program[0][0] == '-') {
      throw CLI::ValidationError(options.program[0], "no such option of smp run");
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("smp: model-parallel training of any LibTorch model", "smp");
  app.require_subcommand(1);
  smp::tools::RunOptions run_options;
  add_run(app, run_options);
  add_check(app, run_options, "doctor",
            "Say what ranks would run on, how fast messages are, and what is likely to be wrong");
  add_check(app, run_options, "selftest", "Train a small model on these ranks, and compare all bits with plain LibTorch");

  std::vector<std::string> arguments(argv + 1, argv + argc);
  translate_own_arguments(arguments);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them last first
  try {
    app.parse(arguments);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kUsageError;
  }
  return smp::tools::run(run_options);
}
