"""What a fault of one rank of four does to a job: when its last process has ended, with which code, and whether somebody says whose
fault it was. smp and torch's DDP over gloo, each under its launchers, all with what they do by default.

Usage: run.py SMP [--limit SECONDS] [--faults FAULT ...]
Prints the table of docs/reliability.md.
"""

import argparse
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "mpi"))
import worlds  # noqa: E402

FAULTS = {
    "killed": "killed by SIGKILL",
    "throws": "an exception",
    "leaves": "leaves the loop early",
    "order": "calls a barrier, the others a step",
    "shape": "a layer of another shape",
    "nan": "NaN in its batch",
    "stopped": "stopped by SIGSTOP",
    "loops": "an endless loop",
}
NUM_RANKS = 4
# By others, by mpirun, or by torchrun's summary; a list of all ranks that wait is none of it.
ACCUSED = re.compile(r"\bon (rank|replica) 2\b|rank 2 \(.*\) (was killed|does not answer)|rank 2 with PID|Root Cause[^=]*?rank +: 2 ")
LAST_WORDS = re.compile(r"^\[rank ?(\d+)\]:? *\S*(?:Error|Traceback)", re.MULTILINE)
START_LIMIT_S = 120


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launchers(smp):
    mpirun = ["mpirun", "-np", str(NUM_RANKS), "--oversubscribe", "--bind-to", "none"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)]
    python = [sys.executable]
    return {
        "smp run": ("smp", [smp, "run", "-np", str(NUM_RANKS), *python]),
        "smp, mpirun": ("smp", [*mpirun, *python]),
        "smp, torchrun": ("smp", torchrun),
        "DDP, mpirun": ("torch", [*mpirun, *python]),
        "DDP, torchrun": ("torch", torchrun),
    }


class Job:
    """One job with one fault."""

    def __init__(self, side, launcher, fault, folder):
        self.token = f"token-{uuid.uuid4().hex}"
        self.file = folder / self.token
        self.output = folder / f"{self.token}.txt"
        environment = {**worlds.ENVIRONMENT, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        if "--nproc-per-node" in launcher:
            launcher = [*launcher, "--master-port", free_port()]
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen([*launcher, HERE / "train.py", side, fault, self.file, self.token], stdout=out,
                                            stderr=subprocess.STDOUT, env=environment)

    def watch(self, limit_s):
        """Seconds from the fault until no process is left; None where some are."""
        start = time.monotonic()
        while not self.file.exists():
            if self.process.poll() is not None or time.monotonic() - start > START_LIMIT_S:
                raise SystemExit(f"the job has not come to its fault:\n{self.output.read_text(errors='replace')}")
            time.sleep(0.01)
        begin = float(self.file.read_text())
        while time.monotonic() - begin < limit_s:
            if self.process.poll() is not None and not worlds.processes_with(self.token):
                return time.monotonic() - begin
            time.sleep(0.02)
        return None

    def kill(self):
        for pid in worlds.processes_with(self.token):
            os.kill(int(pid), 9)
        self.process.kill()
        self.process.wait()

    def names_culprit(self):
        """Where all ranks say why they end, that of the culprit is one of many."""
        printed = self.output.read_text(errors="replace")
        return bool(ACCUSED.search(printed)) or set(LAST_WORDS.findall(printed)) == {"2"}


def measured(side, launcher, fault, limit_s, kept):
    with tempfile.TemporaryDirectory() as folder:
        job = Job(side, launcher, fault, pathlib.Path(folder))
        try:
            seconds = job.watch(min(limit_s, 20) if fault == "nan" else limit_s)
            if seconds is None:
                return "trains on" if fault == "nan" else f"there after {limit_s} s"
            return f"{seconds:.1f} s, {job.process.returncode}, {'named' if job.names_culprit() else 'not named'}"
        finally:
            job.kill()
            if kept:
                shutil.copy(job.output, kept)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("smp")
    parser.add_argument("--limit", type=int, default=150, help="seconds after which a job counts as one that stays")
    parser.add_argument("--faults", nargs="*", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for what each job prints")
    options = parser.parse_args()
    systems = launchers(options.smp)
    print(f"| fault of rank 2 | {' | '.join(systems)} |\n|{'---|' * (len(systems) + 1)}")
    for fault in options.faults:
        cells = []
        for name, (side, launcher) in systems.items():
            kept = options.keep / f"{fault}, {name}.txt" if options.keep else None
            cells.append(measured(side, launcher, fault, options.limit, kept))
        print(f"| {FAULTS[fault]} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
