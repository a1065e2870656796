"""One start of Python and torch for many scripts, each run in forks of it to the end of the interpreter, as by itself.

As a program it is the process that has imported torch and the modules that its arguments name, and forks. ForkedScripts is its
other side.
"""

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types


class ForkedScripts:
    """Runs scripts on ranks that sockets connect, as under torchrun. To be closed."""

    def __init__(self, *modules):
        command = [sys.executable, __file__, *modules]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self):
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def run(self, script, *arguments, ranks=1, **environment):
        """What subprocess.run would return; its code is that of the first rank that failed, else 0."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            files = [f"/proc/{os.getpid()}/fd/{file.fileno()}" for file in (out, errors)]
            request = {"arguments": [str(script), *arguments], "ranks": ranks, "environment": environment, "files": files}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            code = int(self._server.stdout.readline())
            out.seek(0), errors.seek(0)
            return types.SimpleNamespace(returncode=code, stdout=out.read(), stderr=errors.read())


def end_with_parent():
    """So that a rank that hangs ends with a test that was ended for it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def fork(request, rank_environments):
    """On each rank the request; in the server None, once all have ended and it has answered."""
    for environment in rank_environments:
        if os.fork() == 0:
            end_with_parent()
            for file, number in zip(request["files"], (1, 2), strict=True):
                os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(environment)
            return request
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in rank_environments]
    print(next((code for code in codes if code != 0), 0), flush=True)
    return None


def serve():
    """Returns on ranks, with what to run, and at the end of the server with None."""
    for line in sys.stdin:
        request = json.loads(line)
        with support.job_environments(request["ranks"]) as environments:
            own = fork(request, [{**request["environment"], **environment} for environment in environments])
        if own is not None:
            return own["arguments"]
    return None


if __name__ == "__main__":
    import support
    import torch._dynamo  # which the first optimizer loads

    for module in sys.argv[1:]:
        importlib.import_module(module)
    end_with_parent()
    arguments = serve()
    if arguments is not None:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(arguments[0])
        runpy.run_path(arguments[0], run_name="__main__")
