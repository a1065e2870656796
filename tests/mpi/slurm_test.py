"""deploy/slurm.sbatch under a Slurm of one node, made for the test. Needs root, and Debian's packages slurm-wlm and munge.

Usage: slurm_test.py SMP RECOVERING SBATCH
"""

import json
import os
import pathlib
import re
import select
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import worlds

LIMIT_S = 60 * worlds.SLOWNESS
NUM_STEPS = 3000
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""


def free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class Slurm:
    """A controller and a node on this machine, until it is closed."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.host = socket.gethostname().partition(".")[0]
        controller, node = free_ports(2)
        config = self.folder / "slurm.conf"
        config.write_text(CONFIG.format(folder=folder, host=self.host, controller=controller, node=node))
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # v2 wants a mounted hierarchy
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        (self.folder / "state").mkdir()
        config_of_ranks = {"microbatches": 2, "pipeline_parallel_degree": 2, "seed": 5, "log_level": "warning"}
        self.environment = {**worlds.ENVIRONMENT, "SLURM_CONF": str(config), "OMP_NUM_THREADS": "1",
                            "SMP_CONFIG": json.dumps(config_of_ranks), "PATH": f"{SMP.parent}:{os.environ['PATH']}"}
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        munge = [f"--{option}={folder}/munge.{name}" for option, name in files.items()]
        self.daemons = []
        self._start("munged", "--foreground", "--force", *munge)
        self._wait_for("munge", "-n", "-S", f"{folder}/munge.socket")
        self._start("slurmctld", "-D")
        self._wait_for("scontrol", "ping")
        self._start("slurmd", "-D")

    def _start(self, *command):
        log = open(self.folder / f"{command[0]}.log", "wb")
        self.daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def _wait_for(self, *command):
        end = time.monotonic() + LIMIT_S
        while subprocess.run(command, env=self.environment, capture_output=True, check=False).returncode != 0:
            if time.monotonic() > end:
                log = self.folder / f"{self.daemons[-1].args[0]}.log"
                raise AssertionError(f"{command} fails: {log.read_text()}")

    def __call__(self, *command):
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True, timeout=LIMIT_S)
        return done.stdout

    def wait_until(self, job, words):
        end = time.monotonic() + LIMIT_S
        while words not in (found := self("scontrol", "show", "job", job)):
            if time.monotonic() > end or re.search("JobState=(FAILED|CANCELLED|TIMEOUT)", found):
                raise AssertionError(found)

    def close(self):
        for daemon in reversed(self.daemons):
            daemon.terminate()
            daemon.wait()


class Batch(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.slurm = Slurm(self.folder)
        self.addCleanup(self.slurm.close)

    def losses(self, lines):
        return [line.strip() for line in lines if line.startswith("loss ")]

    def test_goes_on_where_it_was_asked_to_stop(self):
        output = pathlib.Path(self.folder, "output")
        output.touch()
        program = RECOVERING, f"{self.folder}/run", str(NUM_STEPS)
        job = self.slurm("sbatch", "--parsable", f"--output={output}", SBATCH, *program).strip()
        with subprocess.Popen(["tail", "-f", "-n", "+1", str(output)], stdout=subprocess.PIPE, text=True) as tail:
            self.addCleanup(tail.kill)
            got = []
            while not got:
                self.assertTrue(select.select([tail.stdout], [], [], LIMIT_S)[0], output.read_text())
                got = self.losses([tail.stdout.readline()])
            tail.kill()
        self.slurm("scancel", "--signal=USR1", "--batch", job)
        self.slurm.wait_until(job, "JobState=PENDING Reason=BeginTime")
        self.assertLess(len(self.losses(output.read_text().splitlines())), NUM_STEPS)
        # In place of two minutes later; in the second in which it has ended the first start Slurm lets no other begin.
        self.slurm("scontrol", "update", "job", job, "StartTime=now+2")
        self.slurm.wait_until(job, "JobState=COMPLETED")
        whole = self.slurm(SMP, "run", "-np", "2", RECOVERING, f"{self.folder}/whole", str(NUM_STEPS))
        self.assertEqual(self.losses(output.read_text().splitlines()), self.losses(whole.splitlines()))

    def test_srun_alone_is_refused_with_what_works(self):
        with self.assertRaises(subprocess.CalledProcessError) as caught:
            self.slurm("srun", "-n", "2", RECOVERING, f"{self.folder}/run", "1")
        self.assertIn("launch: expected a launcher that smp knows, got srun", caught.exception.stderr)


if __name__ == "__main__":
    SMP, RECOVERING, SBATCH = map(pathlib.Path, sys.argv[1:])
    unittest.main(argv=["test"], verbosity=2)
