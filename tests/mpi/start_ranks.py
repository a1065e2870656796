#!/usr/bin/env python3
"""Starts ranks with torchrun's variables, where torchrun itself takes seconds and prints lines of its own.

Usage: start_ranks.py -np N PROGRAM ARGUMENT... As torchrun it ends the others with SIGTERM when one has failed, and its
exit code is that of the first failure.
"""

import os
import signal
import socket
import subprocess
import sys


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(option, count, *command):
    assert option == "-np", option
    environment = {**os.environ, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(free_port())}
    ranks = [subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)})
             for rank in range(int(count))]

    def end_all(*_):
        for rank in ranks:
            if rank.returncode is None:
                rank.terminate()

    signal.signal(signal.SIGTERM, end_all)
    failed = 0
    left = {rank.pid: rank for rank in ranks}
    while left:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        left.pop(pid).returncode = code
        if code != 0 and failed == 0:
            failed = code
            end_all()
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
