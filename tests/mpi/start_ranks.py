#!/usr/bin/env python3
"""Starts ranks with torchrun's variables, where torchrun itself takes seconds and prints lines of its own.

Usage: start_ranks.py -np N PROGRAM ARGUMENT... As torchrun it ends the others with SIGTERM when one has failed, and with SIGKILL
those that it does not end. Its exit code is that of the first failure.
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

    def send_all(number):
        for rank in ranks:
            if rank.returncode is None:
                os.kill(rank.pid, number)

    def end_all(*_):
        send_all(signal.SIGTERM)
        signal.alarm(2)

    signal.signal(signal.SIGTERM, end_all)
    signal.signal(signal.SIGUSR1, lambda number, _: send_all(number))
    signal.signal(signal.SIGALRM, lambda *_: send_all(signal.SIGKILL))
    failed = 0
    left = {rank.pid: rank for rank in ranks}
    while left:
        pid, status = os.wait()  # goes on behind a handler
        code = os.waitstatus_to_exitcode(status)
        left.pop(pid).returncode = code
        if code != 0 and failed == 0:
            failed = code
            end_all()
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
