"""Trains under random faults: a job that `smp run` starts again has the losses, and at its end the state, of one without faults.

Usage: fault_soak.py SMP RECOVERING [--ranks N] [--stages N] [--steps N] [--faults N] [--seed N]

Faults come behind random steps, and, of more than one of each kind, one in six where a restarted rank begins. A rank is killed, or
stopped for good; all ranks are killed at once; mpirun is; a rank is asked to stop, whereupon the job is begun anew by hand; the
newest save is damaged and a rank killed. The job waits behind each step for this script, and so is at most a few steps further
than what has arrived of its output: one for each step whose reader was killed. Prints how many of each there were, how often the
job was started, and the goodput: the time of the job without faults over the time with them; both wait for this script, so that
it is lower than that of a job that does not.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import select
import signal
import subprocess
import sys
import tempfile
import time

import worlds

PREEMPTED = 75
# In which a job prints something: a rank that is stopped while MPI starts is missed after 60, an mpirun that stays after 30 more.
LIMIT_S = 120 * worlds.SLOWNESS


def kill_a_rank(job):
    os.kill(random.choice(job.ranks()), signal.SIGKILL)


def stop_a_rank(job):
    os.kill(random.choice(job.ranks()), signal.SIGSTOP)


def kill_all_ranks(job):
    for rank in job.ranks():
        os.kill(rank, signal.SIGKILL)


def kill_mpirun(job):
    os.kill(job.mpirun(), signal.SIGKILL)


def ask_for_a_stop(job):
    os.kill(random.choice(job.ranks()), signal.SIGUSR1)


def damage_the_newest_save(job):
    _, newest = sorted(job.folder.glob("step_*"), key=lambda save: int(save.name.removeprefix("step_")))[-2:]
    for file in newest.glob("*.safetensors"):
        os.truncate(file, file.stat().st_size - 3)
    kill_a_rank(job)


KINDS = (kill_a_rank, stop_a_rank, kill_all_ranks, kill_mpirun, ask_for_a_stop, damage_the_newest_save)


class Job:
    """`smp run` of all steps in `folder`. faults: what is done behind a step, and, with a negative number, when a rank begins."""

    def __init__(self, options, folder, faults):
        self.options, self.folder, self.faults = options, pathlib.Path(folder), dict(faults)
        self.postponed = []
        self.done = collections.Counter()
        self.losses = {}
        self.num_begun = 0
        os.mkfifo(f"{folder}.pace")
        self.pace = os.open(f"{folder}.pace", os.O_RDWR)
        begin = time.monotonic()
        while (code := self._run()) == PREEMPTED:
            pass
        self.seconds = time.monotonic() - begin
        if code != 0:
            sys.exit(f"the job has ended with {code}")

    def mpirun(self):
        [pid] = children(self.process.pid)
        return pid

    def ranks(self):
        """Those that live; IndexError without one."""
        found = children(self.mpirun())
        found[0]
        return found

    def state(self):
        """The tensors of all ranks behind the last step. Files of saves that faults have cut short may lie beside theirs."""
        folder = self.folder / f"step_{self.options.steps}"
        save = json.loads((folder / "state.json").read_text())["save"]
        return [tensors(file) for file in sorted(folder.glob(f"*.{save}.safetensors"))]

    def _run(self):
        config = {"microbatches": 2, "pipeline_parallel_degree": self.options.stages, "seed": 5, "log_level": "warning",
                  "timeout_s": 3 * worlds.SLOWNESS}
        line = [self.options.smp, "run", "-np", str(self.options.ranks), "--max-restarts", str(4 * self.options.faults),
                self.options.recovering, str(self.folder), str(self.options.steps), f"{self.folder}.pace"]
        self.process = subprocess.Popen(line, stdout=subprocess.PIPE, bufsize=0,
                                        env={**worlds.ENVIRONMENT, "SMP_CONFIG": json.dumps(config)})
        try:
            while printed := self._line():
                self._hear(printed.split())
            return self.process.wait()
        finally:
            self.process.kill()

    def _hear(self, words):
        match words:
            case ["begins"]:
                self.num_begun += 1
                self._inject(lambda when: when == -self.num_begun)
            case ["loss", step, loss]:
                if self.losses.setdefault(step, loss) != loss:
                    sys.exit(f"step {step} had the loss {self.losses[step]}, and has {loss} after a restart")
                self._inject(lambda when: 0 <= when <= int(step))  # a killed mpirun may not have passed some steps on
                os.write(self.pace, b"\n")

    def _line(self):
        """The next one that the job prints; empty at its end."""
        if not select.select([self.process.stdout], [], [], LIMIT_S)[0]:
            subprocess.run(["ps", "-eo", "pid,ppid,stat,etime,args"], check=False)
            sys.exit(f"the job has printed nothing for {LIMIT_S} s")
        return self.process.stdout.readline().decode()

    def _inject(self, is_due):
        """A fault that cannot come yet, since the job is ending of another, or has too few saves, comes with a later one."""
        self.postponed += [self.faults.pop(when) for when in sorted(self.faults) if is_due(when)]
        if self.postponed:
            try:
                self.postponed[0](self)
            except (OSError, ValueError, IndexError):
                return
            self.done[self.postponed.pop(0).__name__] += 1


def tensors(safetensors):
    """What a file says of its tensors, and their bytes."""
    content = safetensors.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return {name: value for name, value in json.loads(content[8:end]).items() if name != "__metadata__"}, content[end:]


def children(pid):
    """Those that have not ended."""
    found = [int(each) for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [each for each in found if pathlib.Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0] != "Z"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("smp")
    parser.add_argument("recovering")
    for name, default in (("ranks", 2), ("stages", 2), ("steps", 2000), ("faults", 12), ("seed", random.randrange(10**6))):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    random.seed(options.seed)
    kinds = [KINDS[n % len(KINDS)] for n in range(options.faults)]
    random.shuffle(kinds)
    at_starts = options.faults // 6 if options.faults > len(KINDS) else 0
    places = random.sample(range(options.steps * 3 // 4), options.faults - at_starts)
    places += random.sample(range(-options.ranks * (options.faults // 2), -options.ranks), at_starts)
    with tempfile.TemporaryDirectory() as folder:
        without = Job(options, f"{folder}/without", {})
        under = Job(options, f"{folder}/under", zip(places, kinds))
        if len(without.losses) != options.steps or not under.losses.items() <= without.losses.items():
            sys.exit("losses differ from those without faults")  # some are missing: what a killed mpirun had not passed on
        if under.state() != without.state() or len(under.state()) != options.stages:
            sys.exit("the state at the end differs from that without faults")
    for kind in KINDS:
        print(f"{kind.__name__} {under.done[kind.__name__]} times")
    print(f"starts {under.num_begun / options.ranks:g} times")
    print(f"seconds_with_faults {under.seconds:.1f} s")
    print(f"goodput {without.seconds / under.seconds:.3f} ratio")
    if under.faults or under.postponed:
        sys.exit(f"{len(under.faults) + len(under.postponed)} faults did not come")


if __name__ == "__main__":
    main()
