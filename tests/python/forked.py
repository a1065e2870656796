"""One start of Python and torch for many scripts, each run in forks of it to the end of the interpreter, as by itself.

As a program it is the process that has imported torch and the modules that its arguments name, and forks. ForkedScripts is its
other side.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pathlib
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types

import forked_rank


@contextlib.contextmanager
def job_environments(count):
    """torchrun's variables, by rank, of a job that sockets connect."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # held until the end, so that only our ranks take the port
        job = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": probe.getsockname()[1]}
        ranks = [{**job, "RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
        yield [{key: str(value) for key, value in rank.items()} for rank in ranks]


class ForkedScripts:
    """To be closed. Threads may use it."""

    def __init__(self, *modules):
        self._folder = tempfile.TemporaryDirectory()
        self._socket = f"{self._folder.name}/socket"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self._socket)
            listening.listen()
            command = [sys.executable, __file__, *modules]
            self._server = subprocess.Popen(command, stdin=listening)

    def close(self):
        self._server.kill()
        self._server.wait()
        self._folder.cleanup()

    def command(self, *arguments):
        """For launchers: in place of sys.executable and these arguments, a script or -m and a module."""
        stub = pathlib.Path(__file__).with_name("forked_rank.py")
        return [sys.executable, "-S", "-E", str(stub), self._socket, *map(str, arguments)]

    def run(self, *arguments, ranks=1, **environment):
        """What subprocess.run would return, of ranks that sockets connect as under torchrun; its code is that of the first that
        failed, else 0."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as nothing:
            files = [file.fileno() for file in (nothing, out, errors)]
            with job_environments(ranks) as environments, contextlib.ExitStack() as connections:
                connected = [
                    connections.enter_context(
                        forked_rank.begin(self._socket, list(map(str, arguments)), {**os.environ, **environment, **own}, files)
                    )
                    for own in environments
                ]
                codes = [code for _, code in sorted(map(forked_rank.ended, connected))]
            out.seek(0), errors.seek(0)
            code = next((code for code in codes if code != 0), 0)
            return types.SimpleNamespace(returncode=code, stdout=out.read(), stderr=errors.read())


def end_with_parent():
    """So that a rank that hangs ends with a test that was ended for it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def become(request, files):
    """This fork what was asked for."""
    end_with_parent()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])


class Forks:
    """Those of a server, by connection."""

    def __init__(self, listening):
        self._listening = listening
        self._pids = {}
        self._ends = {}  # readable when it has ended
        self._num_ended = 0

    def begin(self):
        """In the fork what it is to run; here None."""
        connection, _ = self._listening.accept()
        message, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:  # killed before it has said a word
            connection.close()
            return None
        request = json.loads(message)
        pid = os.fork()
        if pid == 0:
            for other in (self._listening, connection, *self._pids):
                other.close()
            become(request, files)
            return request["arguments"]
        for file in files:
            os.close(file)
        self._pids[connection], self._ends[connection] = pid, os.pidfd_open(pid)
        return None

    def end(self, connection):
        """Waits for it."""
        _, status = os.waitpid(self._pids.pop(connection), 0)
        os.close(self._ends.pop(connection))
        with connection, contextlib.suppress(OSError):  # who asked for it may be gone
            connection.send(f"{self._num_ended} {os.waitstatus_to_exitcode(status)}".encode())
        self._num_ended += 1

    def hand_on(self, connection):
        number = connection.recv(1)
        os.kill(self._pids[connection], number[0] if number else signal.SIGKILL)
        if not number:
            self.end(connection)

    def next(self):
        """What begin() returns of the next one."""
        while True:
            ready, _, _ = select.select([self._listening, *self._pids, *self._ends.values()], [], [])
            for connection in [one for one, end in self._ends.items() if end in ready]:
                self.end(connection)
            for connection in [one for one in self._pids if one in ready]:
                self.hand_on(connection)
            if self._listening in ready:
                return self.begin()


def serve():
    """Returns on forks, with what to run."""
    gc.freeze()  # else each DistributedModel, which collects, goes through all that was imported
    forks = Forks(socket.socket(fileno=0))
    while True:
        arguments = forks.next()
        if arguments is not None:
            return arguments


def run(arguments):
    """As `python ARGUMENTS`."""
    if arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    import support  # noqa: F401
    import torch._dynamo  # which the first optimizer loads

    for module in sys.argv[1:]:
        importlib.import_module(module)
    end_with_parent()
    run(serve())
