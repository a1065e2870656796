"""Slurms made for a test: a controller and nodes on this machine, or on the two hosts of two_hosts.py. Needs root, and Debian's
packages slurm-wlm and munge.
"""

import json
import os
import pathlib
import re
import socket
import subprocess
import time

import two_hosts
import worlds

LIMIT_S = 60 * worlds.SLOWNESS
CONFIG = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmctldPort={controller}
SlurmdPort={node}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdTimeout=10
KillWait=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
TmpFS={folder}/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
"""
NODE = "NodeName={name} NodeAddr={address} CPUs={cpus} State=UNKNOWN\n"


def free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    """A controller, and a node on this machine or on each of `hosts`, until it is closed. Commands run on the first node."""

    def __init__(self, folder, smp, hosts=None):
        self.folder = pathlib.Path(folder)
        addresses = hosts.addresses if hosts else {socket.gethostname().partition(".")[0]: "127.0.0.1"}
        self.on = {name: [hosts.folder / f"on_{name}"] if hosts else [] for name in addresses}
        self.first, *_ = addresses
        controller, node = free_ports(2)
        config = self.folder / "slurm.conf"
        nodes = "".join(NODE.format(name=name, address=address, cpus=2) for name, address in addresses.items())
        partition = f"PartitionName=all Nodes={','.join(addresses)} Default=YES State=UP\n"
        config.write_text(CONFIG.format(folder=folder, first=self.first, address=addresses[self.first], controller=controller,
                                        node=node) + nodes + partition)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 wants a mounted hierarchy
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        for name in ("state", "tmp", *(f"tmp_{name}" for name in addresses)):
            (self.folder / name).mkdir()
        config_of_ranks = {"microbatches": 2, "pipeline_parallel_degree": 2, "seed": 5, "log_level": "warning"}
        self.environment = {**worlds.ENVIRONMENT, "SLURM_CONF": str(config), "OMP_NUM_THREADS": "1",
                            "SMP_CONFIG": json.dumps(config_of_ranks), "PATH": f"{smp.parent}:{os.environ['PATH']}"}
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self.daemons = []
        self._start("munged", "--foreground", "--force", *munge)
        self._wait_for("munge", "-n", "-S", f"{folder}/munge.socket")
        self._start("slurmctld", "-D")
        self._wait_for("scontrol", "ping")
        for name in addresses:
            # Both have the files of one machine, and would make the same folder for PMIx.
            own = f'mount --bind {folder}/tmp_{name} {folder}/tmp; exec slurmd -D -N {name}'
            self._start("unshare", "-m", "bash", "-c", own, on=name)

    def _start(self, *command, on=None):
        log = self.folder / f"{command[0]}_{on}.log"
        with open(log, "wb") as out:
            daemon = subprocess.Popen([*self.on[on or self.first], *command], env=self.environment, stdout=out, stderr=out)
        daemon.log = log
        self.daemons.append(daemon)

    def _wait_for(self, *command):
        end = time.monotonic() + LIMIT_S
        while subprocess.run([*self.on[self.first], *command], env=self.environment, capture_output=True,
                             check=False).returncode != 0:
            if time.monotonic() > end:
                raise AssertionError(f"{command} fails: {self.daemons[-1].log.read_text()}")

    def __call__(self, *command):
        done = subprocess.run([*self.on[self.first], *command], env=self.environment, capture_output=True, text=True, check=True,
                              timeout=LIMIT_S)
        return done.stdout

    def wait_until(self, job, words):
        end = time.monotonic() + LIMIT_S
        while words not in (found := self("scontrol", "show", "job", job)):
            if time.monotonic() > end or re.search("JobState=(FAILED|CANCELLED|TIMEOUT)", found):
                raise AssertionError(found)

    def wait_until_idle(self):
        """All nodes."""
        end = time.monotonic() + LIMIT_S
        while (found := self("sinfo", "-h", "-o", "%T").split()) != ["idle"]:
            if time.monotonic() > end:
                raise AssertionError(found)

    def logs(self):
        """What all daemons have said, for the message of a failure."""
        return "\n".join(f"{daemon.log.name}:\n{daemon.log.read_text()}" for daemon in self.daemons)

    def state(self):
        """What all of it shows of its jobs, their output and their processes."""
        commands = [[*self.on[self.first], "timeout", "10", "scontrol", "show", what] for what in ("job", "step", "node")]
        done = [subprocess.run(each, env=self.environment, capture_output=True, text=True, check=False) for each in commands]
        shown = [each.stdout + each.stderr for each in done]
        outputs = [f"{path}:\n{path.read_text()}" for path in self.folder.glob("output*")]
        processes = subprocess.run(["ps", "-eo", "pid,ppid,stat,wchan:20,args"], capture_output=True, text=True, check=True).stdout
        return "\n".join([*shown, *outputs, processes, self.logs()])

    def close(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()


def losses(lines):
    return [line.strip() for line in lines if line.startswith("loss ")]
