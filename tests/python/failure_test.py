"""A failure of one rank ends the job, and what is printed ends with the traceback and the rank that failed first."""

import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import unittest

from forked import ForkedScripts

SCRIPT = pathlib.Path(__file__).with_name("failing_script.py")

# Behind all that ranks print: paragraphs between rules, in which no rank says a word.
MPIRUNS_OWN = re.compile(r"(-{70,}\n(?!-{70})((?!.*(Traceback|Error|\[rank \d)|-{70}).*\n)+-{70,}\n)*")


scripts = ForkedScripts()
unittest.addModuleCleanup(scripts.close)


def launched(where, **environment):
    launcher = [os.environ["MPIRUN"], "--oversubscribe", "--bind-to", "none", "-np", "2"]
    command = [*launcher, *scripts.command(SCRIPT, where)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


def without_stacks(lines):
    """Of a rank that hangs, whose program has frames of its own."""
    return [line for line in lines if not re.match(r"\[rank 0\] rank 1 #\d+ ", line)]


def run_by_mpirun(where):
    """Its exit code, and what it printed but for mpirun's own lines, which are the last."""
    ended = launched(where)
    printed, rule, behind = ended.stderr.partition("-" * 70)
    if not MPIRUNS_OWN.fullmatch(rule + behind):
        raise AssertionError(f"expected nothing behind mpirun's first line but its own, got {behind}")
    return ended.returncode, printed.strip().splitlines()


class UnderMpirun(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        """What hangs is waited for while the others run."""
        threads = concurrent.futures.ThreadPoolExecutor()
        cls.addClassCleanup(threads.shutdown)
        cls.hanging = {where: threads.submit(run_by_mpirun, where) for where in ("hangs", "hangs_inside")}

    def test_ends_as_it_should_without_one(self):
        self.assertEqual(run_by_mpirun("nowhere"), (0, []))

    def test_leaves_mpi_to_who_has_initialised_it(self):
        self.assertEqual(run_by_mpirun("mpi"), (0, []))

    def test_a_code_of_its_own(self):
        """On one rank, while the other waits in a step for it."""
        code, lines = run_by_mpirun("exit")
        self.assertEqual(code, 5)
        self.assertEqual(lines[-1], "[rank 1] the script called sys.exit(5)")

    def test_a_configuration_that_is_wrong(self):
        """Before ranks know of one another: what one prints may come behind mpirun's lines about another."""
        ended = launched("nowhere", SMP_CONFIG='{"microbatchs": 1}')
        self.assertEqual(ended.returncode, 2)
        self.assertIn('unknown key "microbatchs"; did you mean "microbatches"?', ended.stderr)

    def test_a_rank_that_hangs(self):
        """Which mpirun ends then."""
        code, lines = self.hanging["hangs"].result()
        self.assertEqual(code, 4)
        answers = without_stacks(lines)
        self.assertRegex(answers[-3], r"^\[rank 0\] rank 0 \(.*\): is in step after 0 training steps, waits: ")
        self.assertRegex(answers[-2], r"^\[rank 0\] rank 1 \(.*\): no answer; it computes, in an operator or in the program's own")
        self.assertRegex("\n".join(lines), rf"\n\[rank 0\] rank 1 #0 <module> at {re.escape(str(SCRIPT))}:\d+\n")
        self.assertRegex(lines[-1], r"^\[rank 0\] .*timed out; rank 1 \(pid \d+ on host .*\) does not answer: it computes")

    def test_a_rank_that_hangs_inside_a_step(self):
        """What waits for it says for which operator of which module."""
        code, lines = self.hanging["hangs_inside"].result()
        self.assertEqual(code, 4)
        self.assertRegex(without_stacks(lines)[-3], r"is in step after 0 training steps: receive F of microbatch 0 on stage \d, with smp::opaque of '1'")
        self.assertIn(f"[rank 0] rank 1 #0 forward at {SCRIPT}", "\n".join(lines))
        self.assertRegex(lines[-1], r"^\[rank 0\] step of ranks \{0, 1\}: .*timed out; rank 1 .* does not answer: it computes")


def run(where):
    """Its exit code, and what it printed."""
    ended = scripts.run(SCRIPT, where, ranks=2)
    return ended.returncode, ended.stderr.strip().splitlines()


class Failure(unittest.TestCase):
    def test_outside_of_steps(self):
        code, lines = run("outside")
        self.assertNotEqual(code, 0)
        self.assertEqual(lines[0], "Traceback (most recent call last):")
        self.assertEqual(lines[-2:], ["ValueError: on rank 1", "[rank 1] ValueError: on rank 1"])

    def test_in_a_body(self):
        code, lines = run("body")
        self.assertNotEqual(code, 0)
        self.assertTrue(any('raise KeyError("in the body")' in line for line in lines), lines)
        self.assertIn("KeyError: 'in the body'", lines)
        self.assertTrue(any("KeyError: 'in the body'" in line for line in lines if line.startswith("[rank 1]")), lines)

    def test_in_a_hook(self):
        code, lines = run("hook")
        self.assertNotEqual(code, 0)
        self.assertIn("KeyError: 'in a hook'", lines)
        self.assertEqual(lines[-1], "[rank 1] KeyError: 'in a hook'")

    def test_in_a_hook_that_replaces_a_parameter(self):
        """Before any forward, which would run with the old one."""
        code, lines = run("replacing_hook")
        self.assertNotEqual(code, 0)
        error = "[rank 1] ValueError: register_post_partition_hook: expected the parameters and buffers that the models had when "
        self.assertTrue(lines[-1].startswith(error), lines)

    def test_in_the_order_of_opaque_modules(self):
        """Where one rank would run Tanh for the other's ReLU."""
        code, lines = run("order")
        self.assertNotEqual(code, 0)
        error = "ValueError: opaque: expected calls for the same modules in the same order on all ranks, got others on pp_rank "
        self.assertTrue(any(line.startswith(f"{error}1 than on 0 (the first that differs is 1)") for line in lines), lines)

    def test_of_an_opaque_module_that_gives_a_parameter_other_data(self):
        """Which are the same on zeros, where the call is recorded."""
        code, lines = run("doubled")
        self.assertNotEqual(code, 0)
        error = "NotImplementedError: Doubling: expected a forward that leaves the parameters, .* got others for bias. "
        self.assertTrue(any(re.search(error, line) for line in lines), lines)

    def test_of_a_parameter_that_is_replaced_on_one_rank(self):
        """Which no other sees. Caught there, as it is here once, it comes again."""
        code, lines = run("replaced")
        self.assertNotEqual(code, 0)
        error = "step: expected the parameters and buffers that the models had when they were wrapped, got others for 0"
        self.assertTrue(lines[0].startswith(error), lines)
        self.assertTrue(lines[-1].startswith(f"[rank 1] ValueError: {error}"), lines)

    def test_codes_by_kind(self):
        for where, code in (("loads", 7), ("memory", 8), ("calls", 5), ("stops", 75)):
            with self.subTest(where):
                self.assertEqual(run(where)[0], code)


class StandIns(unittest.TestCase):
    """What launchers start in place of ranks (forked_rank.py)."""

    def start(self, program):
        script = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()), "script.py")
        script.write_text(f"import os, signal, sys\n{program}\n")
        return self.enterContext(subprocess.Popen(scripts.command(script), stdout=subprocess.PIPE, text=True))

    def test_end_as_their_rank_does(self):
        for program, code in (("sys.exit(3)", 3), *((f"os.kill(os.getpid(), {n:d})", -n) for n in (signal.SIGTERM, signal.SIGKILL))):
            with self.subTest(code):
                self.assertEqual(self.start(program).wait(), code)

    def test_hand_on_signals(self):
        """The end of what it prints is that of the rank."""
        program = """
def come(*_):
    print("has come", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, come)
print("ready", flush=True)
while True:
    signal.pause()"""
        for number, printed, code in ((signal.SIGTERM, "has come\n", 7), (signal.SIGKILL, "", -signal.SIGKILL)):
            with self.subTest(number):
                stand_in = self.start(program)
                self.assertEqual(stand_in.stdout.readline(), "ready\n")
                stand_in.send_signal(number)
                self.assertEqual(stand_in.stdout.read(), printed)
                self.assertEqual(stand_in.wait(), code)


if __name__ == "__main__":
    unittest.main()
