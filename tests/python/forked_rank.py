"""python -S forked_rank.py SOCKET SCRIPT ...: what a launcher starts in place of `python SCRIPT ...`.

The script runs in a fork of the process behind the socket (forked.py), which has imported torch, with the arguments, environment,
folder and files of this one. This one hands on the signals that it gets, and ends as that does; when it is killed, so is that.
Imports little: it is to be there at once.
"""

import json
import os
import signal
import socket
import sys

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def begin(path, arguments, environment, files):
    """A connection to the fork. A byte sent is a signal for it; what comes is how it has ended; closed, it is killed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    request = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection


def ended(connection):
    """How many forks had ended before it, and its exit code, or minus the signal that has ended it."""
    return tuple(map(int, connection.recv(64).split()))


if __name__ == "__main__":
    rank = begin(sys.argv[1], sys.argv[2:], dict(os.environ), (0, 1, 2))
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: rank.send(bytes([number])))
    _, code = ended(rank)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
