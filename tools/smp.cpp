// The program smp: parses the command line; each subcommand lives in its own file.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "tools/run.h"

namespace {

constexpr int kUsageError = 2;

// Whose values could be taken for the program.
constexpr std::string_view kOptionsWithWords[] = {"--hosts", "--hostfile", "--interface", "--log-dir"};

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
    if (*argument != "run" && argument->rfind('-', 0) != 0 && !is_number) return;
  }
}

void add_run(CLI::App& app, smp::tools::RunOptions& options) {
  auto* run = app.add_subcommand("run", "Start a program on several processes of this machine, with the right mpirun flags");
  run->add_option("--np,-n", options.num_processes, "Processes (also: -np)")->required()->check(CLI::Range(1, 65536));
  run->add_option("--timeout", options.timeout_s, "End the job after so many seconds")->check(CLI::Range(1, 1 << 30));
  auto* hosts = run->add_option("--hosts", options.hosts, "Hosts and processes of each, by ssh: a:4,b:4");
  run->add_option("--hostfile", options.host_file, "A file of them, of mpirun's form")->excludes(hosts);
  run->add_option("--interface", options.interface, "Network between the hosts: eth0, or 10.0.0.0/16");
  run->add_option("--max-restarts", options.max_restarts, "Start a job that fails again, so often")
      ->check(CLI::Range(0, 1 << 30));
  run->add_option("--grace", options.grace_s, "Seconds for a save after SIGTERM (30)")->check(CLI::Range(0, 1 << 20));
  run->add_option("--log-dir", options.log_dir, "A folder for what each rank prints");
  run->add_flag("--tag-output", options.tag_output, "Say of each line which rank has printed it");
  run->add_flag("--dry-run", options.dry_run, "Print the line that would run, and stop");
  run->footer("Usage: smp run -np N [options] program [arguments ...]");
  run->prefix_command();
  run->callback([run, &options] {
    options.program = run->remaining();
    if (options.program.empty() || options.program[0].empty()) {
      throw CLI::ValidationError("program", "expected a program to run, got none");
    }
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
