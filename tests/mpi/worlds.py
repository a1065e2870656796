"""Worlds of real processes for tests: started by mpirun, ended by themselves, nothing left."""

import concurrent.futures
import os
import pathlib
import select
import subprocess
import sys
import time
import unittest
import uuid

# How many times longer than on the machine that limits are written for everything takes (cmake/SmpTest.cmake).
SLOWNESS = int(os.environ.get("SMP_TEST_SLOWNESS", "1"))
# The form that `make test-long` runs.
IS_LONG = os.environ.get("SMP_TEST_LONG") == "1"
long = unittest.skipUnless(IS_LONG, "left to make test-long")
# Until a world counts as hanging; nothing here takes longer than a few seconds.
TIMEOUT_S = 30 * SLOWNESS
ENVIRONMENT = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def processes_with(token):
    """Process ids whose command line contains `token`."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if token.encode() in pathlib.Path("/proc", pid, "cmdline").read_bytes():
                found.append(pid)
        except OSError:  # it has gone meanwhile
            pass
    return found


def name_of(pid):
    """What its program is called, cut to 15 characters."""
    return pathlib.Path("/proc", str(pid), "comm").read_text().strip()


def left_behind(token):
    """Those of them that do not end. One that mpirun has killed may take a while to give its memory back."""
    for pid in processes_with(token):
        wait_for_end(int(pid))
    return processes_with(token)


def wait_for_end(pid):
    """Of a process that ends by itself."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [], TIMEOUT_S)
    os.close(descriptor)


def pid_of_rank(token, rank):
    """The process that mpirun has started as `rank` of the world with `token`."""
    variable = f"OMPI_COMM_WORLD_RANK={rank}".encode()
    for pid in processes_with(token):
        if variable in pathlib.Path("/proc", pid, "environ").read_bytes().split(b"\0"):
            return int(pid)
    raise LookupError(f"rank {rank} of {token} is not running")


def listening_ports(pid):
    """The TCP ports on which a process listens."""
    sockets = set()
    for descriptor in pathlib.Path("/proc", str(pid), "fd").iterdir():
        try:
            sockets.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
        except OSError:  # closed meanwhile
            pass
    ports = []
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc", str(pid), "net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                ports.append(int(fields[1].rpartition(":")[2], 16))
    return ports


class WorldTestCase(unittest.TestCase):
    """One world at a time. `self.output` is all that it has printed, for messages."""

    mpirun = ()  # program and flags
    program = ""

    def start(self, num_ranks, *arguments, environment=None):
        """mpirun with one argument more, which tells its processes from all others."""
        self.token = f"token-{uuid.uuid4().hex}"
        return subprocess.Popen(
            [self.mpirun[0], "-np", str(num_ranks), *self.mpirun[1:], self.program, *arguments, self.token],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**ENVIRONMENT, **(environment or {})})

    def finish(self, job, timeout_s=TIMEOUT_S):
        """All lines of the world, which has ended by itself and left no process."""
        try:
            self.output, _ = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            left = processes_with(self.token)
            job.kill()
            for pid in left:
                os.kill(int(pid), 9)
            self.fail(f"still running after {timeout_s} s: {left}\n{job.communicate()[0]}")
        self.assertEqual(left_behind(self.token), [], self.output)
        return self.output.splitlines()


def reports(lines):
    """The lines in which ranks say why they end."""
    return [line for line in lines if line.startswith("[rank")]


def rank_lines(lines):
    """The lines that ranks have printed, without mpirun's own."""
    return [line for line in lines if line.startswith(("say:", "[rank"))]


class SideBySide(unittest.TestSuite):
    """Some of its tests run at once, for they mostly wait; each has a result of its own."""

    at_once = 3

    def run(self, result, debug=False):
        def run_one(test):
            own = unittest.TestResult()
            begin = time.monotonic()
            test.run(own)
            print(f"{test.id()} {time.monotonic() - begin:.1f} s", file=sys.stderr)
            return own
        tests = [test for suite in self for test in (suite if isinstance(suite, unittest.TestSuite) else [suite])]
        with concurrent.futures.ThreadPoolExecutor(self.at_once) as threads:
            for own in threads.map(run_one, tests):
                result.testsRun += own.testsRun
                for kind in ("failures", "errors", "skipped", "unexpectedSuccesses"):
                    getattr(result, kind).extend(getattr(own, kind))
        return result


def run_side_by_side(*names):
    """Runs the tests of the calling script, or those of its classes that are named."""
    loader = unittest.TestLoader()
    loader.suiteClass = SideBySide
    unittest.main(argv=["test", *names], testLoader=loader)


def main(arguments):
    """Likewise, all of them. arguments: PROGRAM MPIRUN [mpirun flag ...]"""
    WorldTestCase.program, *WorldTestCase.mpirun = arguments
    run_side_by_side()
