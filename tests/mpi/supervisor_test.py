"""`smp run` beside mpirun: signals, ends, restarts, and that nothing is left.

Usage: supervisor_test.py SMP FAILING_WORLD
"""

import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import unittest
import uuid

import worlds

LIMIT_S = 60 * worlds.SLOWNESS


def smp(*arguments):
    return subprocess.run([SMP, *arguments], capture_output=True, text=True, check=False)


# Says what has come, and ends as its argument says: "stops" with 75 at SIGUSR1, if its worker still answers, "fails" then,
# "stays" at nothing but SIGKILL.
RANK = r"""
import os, signal, subprocess, sys
worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
def worker_answers():
    worker.stdin.write(b"x\n")
    return worker.stdout.readline() == b"x\n"
def come(number, _):
    os.write(1, f"{signal.Signals(number).name}\n".encode())
    if sys.argv[1] == "stops":
        sys.exit(75 if worker_answers() else 1)
    if sys.argv[1] == "fails":
        sys.exit(1)
worker_answers()
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, come)
os.write(1, b"ready\n")
while True:
    signal.pause()
"""


# In place of mpirun: ends with a code and leaves a process, which answers the SIGTERM that ends it by a signal to `smp run`.
LEAVING = r"""
import os, signal, subprocess, sys
LEFT = r'''
import os, signal, sys
def come(*_):
    os.kill(int(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)
signal.signal(signal.SIGTERM, come)
os.write(1, b"ready\n")
while True:
    signal.pause()
'''
left = subprocess.Popen([sys.executable, "-c", LEFT, str(os.getppid()), os.environ["SIGNAL"]], stdout=subprocess.PIPE)
left.stdout.readline()
sys.exit(int(os.environ["CODE"]))
"""


class Supervised(unittest.TestCase):
    def start(self, *options, program):
        """Two ranks that are ready."""
        self.token = f"token-{uuid.uuid4().hex}"
        job = subprocess.Popen([SMP, "run", "-np", "2", *options, sys.executable, "-c", RANK, program, self.token],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2):
            self.assertEqual(job.stdout.readline(), "ready\n")
        return job

    def ranks(self):
        found = []
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = pathlib.Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if self.token.encode() in words and b"run" not in words and not words[0].endswith(b"mpirun"):
                found.append(int(pid))
        return found

    def mpirun_of(self, job):
        [pid] = pathlib.Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        return int(pid)

    def environment_with_mpirun(self, script):
        """One whose mpirun is this."""
        folder = self.enterContext(tempfile.TemporaryDirectory())
        mpirun = pathlib.Path(folder, "mpirun")
        mpirun.write_text(script)
        mpirun.chmod(0o755)
        return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}

    def test_sigterm_asks_for_a_stop(self):
        job = self.start(program="stops")
        job.terminate()
        printed, _ = job.communicate(timeout=LIMIT_S)
        self.assertEqual(printed.split().count("SIGUSR1"), 2)
        self.assertEqual(job.returncode, 75)
        self.assertEqual(self.ranks(), [])

    def test_a_job_that_was_asked_to_stop_is_not_started_again(self):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(number):
                job = self.start("--max-restarts", "1", program="fails")
                job.send_signal(number)
                _, printed = job.communicate(timeout=LIMIT_S)
                self.assertEqual(job.returncode, 1)
                self.assertNotIn("restart 1", printed)

    def test_who_does_not_stop_is_killed(self):
        job = self.start("--grace", "1", program="stays")
        job.terminate()
        printed, _ = job.communicate(timeout=LIMIT_S)
        self.assertEqual(printed.split().count("SIGUSR1"), 2)
        self.assertNotEqual(job.returncode, 0)
        self.assertEqual(self.ranks(), [])

    def test_a_killed_mpirun_leaves_nothing(self):
        job = subprocess.Popen([SMP, "run", "-np", "2", FAILING_WORLD, "interrupted", "token"], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
        for _ in range(2):
            while "ready" not in (line := job.stdout.readline()):
                self.assertTrue(line, "ended before it was ready")
        mpirun = self.mpirun_of(job)
        ranks = pathlib.Path(f"/proc/{mpirun}/task/{mpirun}/children").read_text().split()
        maps = "".join(pathlib.Path("/proc", rank, "maps").read_text() for rank in ranks)
        segments = set(re.findall("/dev/shm/vader_segment.*", maps))
        self.assertEqual(len(segments), 2)
        os.kill(mpirun, signal.SIGKILL)
        printed = job.stdout.read()
        self.assertEqual(job.wait(), 128 + signal.SIGKILL, printed)
        self.assertEqual([rank for rank in ranks if pathlib.Path("/proc", rank).exists()], [])
        self.assertEqual([segment for segment in segments if pathlib.Path(segment).exists()], [])
        self.assertEqual(list(pathlib.Path(tempfile.gettempdir()).glob(f"ompi.*/pid.{mpirun}")), [])

    def test_a_killed_supervisor_takes_the_job_with_it(self):
        job = self.start(program="stays")
        waiting = [os.pidfd_open(pid) for pid in self.ranks()]
        self.assertEqual(len(waiting), 2)
        job.kill()
        while waiting:
            ready, _, _ = select.select(waiting, [], [], LIMIT_S)
            self.assertTrue(ready, "still running")
            for descriptor in ready:
                waiting.remove(descriptor)
                os.close(descriptor)
        job.communicate()

    def test_processes_that_ranks_leave_are_ended(self):
        token = f"token-{uuid.uuid4().hex}"
        leave = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()', '{token}'], " \
                "start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
        self.assertEqual(smp("run", "-np", "2", sys.executable, "-c", leave).returncode, 0)
        self.assertEqual(worlds.processes_with(token), [])

    def test_a_signal_that_comes_when_the_job_has_ended_does_not_change_its_code(self):
        environment = self.environment_with_mpirun(f"#!{sys.executable}\n{LEAVING}")
        for code in (0, 75):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                with self.subTest(code=code, number=number):
                    variables = {"CODE": str(code), "SIGNAL": str(int(number))}
                    run = subprocess.run([SMP, "run", "-np", "1", "true"], env={**environment, **variables}, capture_output=True,
                                         check=False)
                    self.assertEqual(run.returncode, code, run.stderr)

    def test_a_stop_between_two_starts_ends_it_with_the_code_of_a_stop(self):
        """It is held there by a pipe that takes no more of what it prints."""
        environment = self.environment_with_mpirun("#!/bin/sh\nread -r line\nexit 9\n")
        for number in (signal.SIGTERM, signal.SIGUSR1):
            with self.subTest(number):
                printed, out = os.pipe()
                filling = os.open(f"/proc/self/fd/{out}", os.O_WRONLY | os.O_NONBLOCK)
                run = subprocess.Popen([SMP, "run", "-np", "1", "--max-restarts", "1", "true"], env=environment,
                                       stdin=subprocess.PIPE, stderr=out)
                os.close(out)
                with os.fdopen(printed, "rb", buffering=0) as lines:
                    self.assertIn(b"mpirun", lines.readline())
                    with self.assertRaises(BlockingIOError):
                        while True:
                            os.write(filling, b".")
                    os.close(filling)
                    run.stdin.close()
                    while pathlib.Path(f"/proc/{run.pid}/syscall").read_text().split()[1:2] != ["0x2"]:
                        self.assertIsNone(run.poll())
                    run.send_signal(number)
                    self.assertIn(b"the job has ended with 9", lines.read())
                self.assertEqual(run.wait(), 75)

    @worlds.long  # half a minute; with a shorter limit and another program in tests/unit/tools/supervise_test.cpp
    def test_a_program_that_stays_when_its_ranks_have_gone_is_ended(self):
        """mpirun does so now and then where a rank ends while the two connect; stopped, it does so always."""
        job = self.start(program="stays")
        mpirun = self.mpirun_of(job)
        os.kill(mpirun, signal.SIGSTOP)
        for rank in self.ranks():
            os.kill(rank, signal.SIGKILL)
        _, printed = job.communicate(timeout=LIMIT_S)
        self.assertEqual(job.returncode, 128 + signal.SIGKILL)
        self.assertIn("smp run: mpirun does not end though all that it has started has: killed\n", printed)
        self.assertEqual(worlds.processes_with(self.token), [])

    def test_children_of_before_are_none_of_its_business(self):
        line = f"sleep 1000 >/dev/null 2>&1 & echo $!; exec {SMP} run -np 1 true"
        result = subprocess.run(["sh", "-c", line], stdout=subprocess.PIPE, text=True, check=True, env=worlds.ENVIRONMENT)
        os.kill(int(result.stdout), signal.SIGKILL)  # which fails where it has ended

    def test_a_job_that_fails_is_started_again(self):
        with tempfile.NamedTemporaryFile() as log:
            script = f'echo "$SMP_RESTART_COUNT" >> {log.name}; [ "$SMP_RESTART_COUNT" = 2 ] || exit 9'
            result = smp("run", "-np", "1", "--max-restarts", "3", "sh", "-c", script)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(pathlib.Path(log.name).read_text().split(), ["0", "1", "2"])
            self.assertIn("smp run: the job has ended with 9; restart 2 of 3\n", result.stderr)
        self.assertEqual(smp("run", "-np", "1", "--max-restarts", "1", "sh", "-c", "exit 9").returncode, 9)
        self.assertNotIn("restart 1", smp("run", "-np", "1", "--max-restarts", "1", "sh", "-c", "exit 2").stderr)

    def test_a_job_whose_time_is_over_is_not_started_again(self):
        result = smp("run", "-np", "1", "--timeout", "1", "--max-restarts", "1", "sleep", "1000")
        self.assertEqual(result.returncode, 110, result.stderr)
        self.assertNotIn("restart 1", result.stderr)

    def test_keeps_what_ranks_print_of_each_start(self):
        with tempfile.TemporaryDirectory() as folder:
            script = 'echo "start $SMP_RESTART_COUNT"; [ "$SMP_RESTART_COUNT" = 2 ] || exit 9'
            result = smp("run", "-np", "1", "--max-restarts", "2", "--log-dir", folder, "sh", "-c", script)
            self.assertEqual(result.returncode, 0, result.stderr)
            for start, of_start in enumerate((folder, f"{folder}/restart_1", f"{folder}/restart_2")):
                (printed,) = pathlib.Path(of_start).glob("rank.*/stdout")
                self.assertEqual(printed.read_text(), f"start {start}\n")

    def test_keeps_and_tags_what_ranks_print(self):
        with tempfile.TemporaryDirectory() as folder:
            result = smp("run", "--log-dir", folder, "--tag-output", "-np", "2", "echo", "hello")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(sorted(line.split("<stdout>")[0] for line in result.stdout.splitlines()), ["[1,0]", "[1,1]"])
            kept = sorted(pathlib.Path(folder).rglob("stdout"))
            self.assertEqual([path.read_text().rpartition(":")[2] if ":" in path.read_text() else path.read_text() for path in kept], ["hello\n"] * 2)


if __name__ == "__main__":
    SMP, FAILING_WORLD = sys.argv[1:]
    worlds.run_side_by_side()
