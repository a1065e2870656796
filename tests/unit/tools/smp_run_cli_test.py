"""The program `smp run` as a user meets it: its exit codes, its messages, what reaches the program."""

import os
import subprocess
import sys
import unittest

SMP = sys.argv.pop(1)
HAVE_MPI = sys.argv.pop(1) == "TRUE"


def smp(*arguments, **environment):
    return subprocess.run([SMP, *arguments], capture_output=True, text=True, env={**os.environ, **environment})


class SmpRun(unittest.TestCase):
    def test_dry_run_prints_the_line_and_runs_nothing(self):
        result = smp("run", "-np", "3", "--dry-run", "./absent", "-np", "7", "--timeout", "5", "--help")
        self.assertEqual(result.returncode, 0)
        self.assertEqual(result.stdout, "")
        self.assertRegex(result.stderr, r"^smp run: .*mpirun -np 3 .* \./absent -np 7 --timeout 5 --help\n$")

    def test_options_may_come_in_any_order_and_spelling(self):
        for arguments in (["-n", "2", "--timeout", "9"], ["--timeout", "9", "-np", "2"], ["--np", "2", "--timeout=9", "--"]):
            with self.subTest(arguments):
                result = smp("run", "--dry-run", *arguments, "prog")
                self.assertRegex(result.stderr, r"mpirun -np 2 .*--timeout 9 prog\n$")

    def test_words_of_options_are_not_taken_for_the_program(self):
        result = smp("run", "--dry-run", "--hosts", "a:2,b:2", "--interface", "eth0", "-np", "4", "./prog", "-np", "9")
        self.assertRegex(result.stderr, r"mpirun -np 4 .*--host a:2,b:2 .*\./prog -np 9\n$")

    def test_a_script_runs_under_the_python_of_path_whatever_its_mode(self):
        result = smp("run", "-np", "2", "--dry-run", "train.py", "other.py")
        self.assertRegex(result.stderr, r" lo (--oversubscribe )?python3 train\.py other\.py\n$")

    def test_bad_usage_exits_with_2_and_says_what_is_wrong(self):
        for arguments, message in (
            ([], "subcommand is required"),
            (["run", "prog"], "--np is required"),
            (["run", "-np", "0", "prog"], "not in range"),
            (["run", "-np", "2"], "expected a program"),
            (["run", "-np", "2", "--nope", "prog"], "--nope: no such option"),
            (["run", "-np", "2", "--min-np", "1", "prog"], "--min-np requires --hosts"),
            (["run", "-np", "2", "--hosts", "a:2", "--min-np", "1", "prog"], "--min-np requires --max-restarts"),
            (["run", "-np", "2", "--hosts", "a:x", "--max-restarts", "1", "--min-np", "1", "p"], "expected hosts and processes"),
            (["run", "-np", "3", "--hosts", "a,b", "--max-restarts", "1", "--min-np", "3", "p"], "at most the 2 processes"),
        ):
            with self.subTest(arguments):
                result = smp(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertIn(message, result.stderr)

    def test_missing_mpirun_is_named_with_the_way_out(self):
        result = smp("run", "-np", "2", "./prog", PATH="/nonexistent")
        self.assertEqual(result.returncode, 2)
        self.assertIn("expected Open MPI's mpirun in PATH", result.stderr)
        self.assertIn("openmpi-bin", result.stderr)

    @unittest.skipUnless(HAVE_MPI, "built without MPI")
    def test_every_process_gets_the_arguments_and_the_exit_code_comes_back(self):
        result = smp("run", "-np", "3", "sh", "-c", 'echo "$OMPI_COMM_WORLD_RANK [$1]"', "sh", "a b;c")
        self.assertEqual(sorted(result.stdout.splitlines()), ["0 [a b;c]", "1 [a b;c]", "2 [a b;c]"])
        self.assertEqual(smp("run", "-np", "1", "sh", "-c", "exit 7").returncode, 7)

    @unittest.skipUnless(HAVE_MPI, "built without MPI")
    def test_the_printed_line_does_the_same_in_a_shell(self):
        result = smp("run", "-np", "2", "echo", "a  b")
        line = result.stderr.splitlines()[0].removeprefix("smp run: ")
        again = subprocess.run(line, shell=True, capture_output=True, text=True)
        self.assertEqual(again.stdout, result.stdout)
        self.assertEqual(again.stdout, "a  b\na  b\n")


if __name__ == "__main__":
    unittest.main()
