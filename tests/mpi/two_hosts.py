"""Two or three hosts on one machine: network namespaces h1, h2 and h3 with names of their own, on a switch whose cables can be pulled. Needs root
and iproute2.

  with two_hosts.Hosts() as hosts:
      hosts.start("h1", ["smp", "run", "--hosts", "h1:1,h2:1", ...])
      hosts.cut()

In place of ssh mpirun has a script, which asks this process to start what is to run on the other host: as there, it is no child
of mpirun's. `serve_ssh` puts Debian's openssh-server in its place.
"""

import contextlib
import os
import pathlib
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import uuid

ADDRESSES = {"h1": "10.77.0.1", "h2": "10.77.0.2", "h3": "10.77.0.3"}


AGENT = """
import socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect(sys.argv[1])
    asked.sendall(chr(0).join(sys.argv[2:]).encode())
    asked.shutdown(socket.SHUT_WR)
    sys.exit(int(asked.recv(16) or 255))
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    is_cut = False

    def __init__(self, number=2):
        self.addresses = dict(list(ADDRESSES.items())[:number])

    def __enter__(self):
        self.cleanup = contextlib.ExitStack()
        with self.cleanup:
            self.folder = pathlib.Path(self.cleanup.enter_context(tempfile.TemporaryDirectory()))
            mark = uuid.uuid4().hex[:6]  # several at once
            self.spaces = {name: f"smp-{mark}-{name}" for name in ("switch", *self.addresses)}
            for space in self.spaces.values():
                ip("netns", "add", space)
                self.cleanup.callback(ip, "netns", "del", space)
            self.cleanup.callback(self.kill_all)
            ip("-n", self.spaces["switch"], "link", "add", "bridge", "type", "bridge")
            ip("-n", self.spaces["switch"], "link", "set", "bridge", "up")
            for name, address in self.addresses.items():
                own = self.spaces[name]
                ip("-n", self.spaces["switch"], "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", own)
                ip("-n", self.spaces["switch"], "link", "set", name, "master", "bridge", "up")
                ip("-n", own, "addr", "add", f"{address}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    ip("-n", own, "link", "set", link, "up")
            (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in self.addresses.items()))
            for name in self.addresses:
                self.script(f"on_{name}", f"""exec ip netns exec {self.spaces[name]} unshare -u -m bash -c '
                    hostname {name}; mount --bind {self.folder}/hosts /etc/hosts; exec "$@"' - "$@" """)
            self.agent = self.script("agent", f"exec {sys.executable} -c '{AGENT}' {self.folder}/asked \"$@\"")
            self.serve()
            self.cleanup = self.cleanup.pop_all()
        return self

    def __exit__(self, *_):
        self.cleanup.close()

    def script(self, name, text):
        path = self.folder / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
        return path

    def serve(self):
        hosts = self

        class Asked(socketserver.StreamRequestHandler):
            def handle(self):
                host, *command = self.rfile.read().decode().split("\0")
                if hosts.is_cut:
                    return  # the agent ends with 255, as ssh does
                started = subprocess.run([hosts.folder / f"on_{host}", "bash", "-c", " ".join(command)],
                                         stdin=subprocess.DEVNULL, check=False)
                with contextlib.suppress(BrokenPipeError):
                    self.wfile.write(str(started.returncode % 256).encode())

        server = socketserver.ThreadingUnixStreamServer(str(self.folder / "asked"), Asked)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        self.cleanup.callback(server.server_close)
        self.cleanup.callback(server.shutdown)

    def serve_ssh(self):
        """A daemon on each host, whose keys the others know; nothing of this machine's own ssh is read or changed."""
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("own_key", "host_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / key], check=True)
        known = (self.folder / "host_key.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{name} {known}" for name in self.addresses))
        (self.folder / "ssh_config").write_text(f"IdentityFile {self.folder}/own_key\nIdentitiesOnly yes\nBatchMode yes\n"
                                                f"UserKnownHostsFile {self.folder}/known_hosts\nStrictHostKeyChecking yes\n")
        self.agent = f"ssh -F {self.folder}/ssh_config"
        options = [f"{name}={os.environ[name]}" for name in ("ASAN_OPTIONS", "UBSAN_OPTIONS") if name in os.environ]
        for name, address in self.addresses.items():
            config = self.folder / f"sshd_config_{name}"
            config.write_text(f"ListenAddress {address}\nHostKey {self.folder}/host_key\nUsePAM no\nStrictModes no\nPidFile none\n"
                              f"AuthorizedKeysFile {self.folder}/own_key.pub\nPasswordAuthentication no\n"
                              + (f"SetEnv {' '.join(options)}\n" if options else ""))
            daemon = subprocess.Popen([self.folder / f"on_{name}", "/usr/sbin/sshd", "-D", "-e", "-f", config],
                                      stderr=subprocess.PIPE, text=True)
            self.cleanup.callback(daemon.wait)
            self.cleanup.callback(daemon.kill)
            line = daemon.stderr.readline()
            if "listening" not in line:
                raise RuntimeError(line + daemon.stderr.read())

    def start(self, host, command, environment):
        """A process of `host`, with what it prints on one pipe."""
        return subprocess.Popen([self.folder / f"on_{host}", *map(str, command)], text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, env={**environment, "OMPI_MCA_plm_rsh_agent": str(self.agent)})

    def cut(self):
        """Pulls the cable of h2."""
        self.is_cut = True
        ip("-n", self.spaces["switch"], "link", "set", "h2", "down")

    def sockets(self, host, *options):
        """The words of each line of `ss -tnH`."""
        command = ["ip", "netns", "exec", self.spaces[host], "ss", "-tnH", *options]
        return [line.split() for line in subprocess.check_output(command, text=True).splitlines()]

    def wait_until_quiet(self, host):
        """All that its connections have sent has arrived."""
        while any(words[2] != "0" for words in self.sockets(host)):
            pass

    def listening(self, host, but):
        """The addresses on which somebody listens on another port than that."""
        ends = [words[3].rpartition(":") for words in self.sockets(host, "-l")]
        return {address for address, _, port in ends if int(port) != but}

    def processes(self, host):
        listed = subprocess.run(["ip", "netns", "pids", self.spaces[host]], check=True, capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill_all(self):
        for name in self.addresses:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
