"""Measures smp against torch on the same two cores: both sides' processes live side by side, and all but one sleep.

make peers                                 the six models, 4 and 8 microbatches
python run.py BUILD/bin [MODEL ...]        some of them; --microbatches 8 --rounds 5

For each model the contenders take turns, --rounds times; a round is the median of some steps of each, the figure the median
of the rounds. Prints both raw times and the ratio: above 1, smp is faster.
"""
import argparse
import math
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PIPELINES = ["gpipe", "1f1b", "interleaved"]
MODELS = ["lm-small", "lm-medium", "mlp-tiny", "mlp-wide", "gpt2", "resnet"]
SECONDS_PER_ROUND = 1.0
LEAST_STEPS, MOST_STEPS = 3, 40


def descendants(pid):
    """A process and all it has started."""
    children = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        queue += children.get(found[-1], [])
    return found


class Side:
    """Processes that answer "how long do N steps take". They sleep between questions."""

    def __init__(self, commands, environment):
        self.log = tempfile.TemporaryFile("w+")
        self.processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                             stderr=self.log, text=True, env={**os.environ, **environment})
            for i, command in enumerate(commands)]
        self.leader = self.processes[0]
        self.says = self._answer().split()
        self._signal(signal.SIGSTOP)

    def _answer(self):
        line = self.leader.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.log.read()}\nrun.py: expected an answer of {self.leader.args}, got its end")
        return line

    def _signal(self, number):
        for process in self.processes:
            for pid in descendants(process.pid):
                os.kill(pid, number)

    def seconds(self, question):
        self._signal(signal.SIGCONT)
        self.leader.stdin.write(question + "\n")
        self.leader.stdin.flush()
        answer = [float(word) for word in self._answer().split()]
        self._signal(signal.SIGSTOP)
        return answer

    def close(self):
        self._signal(signal.SIGCONT)
        self.leader.stdin.close()
        for process in self.processes:
            process.wait(timeout=60)
        self.log.close()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def smp_side(binaries, model, microbatches, layout):
    command = [binaries / "smp", "run", "-np", "2", binaries / "smp_peer", model, str(microbatches), layout]
    return Side([[str(word) for word in command]], {"OMP_NUM_THREADS": "1"})


def torch_side(model, microbatches, contenders):
    port = free_port()
    commands = [[sys.executable, str(HERE / "peer.py"), str(rank), port, model, str(microbatches), *contenders]
                for rank in (0, 1)]
    return Side(commands, {"OMP_NUM_THREADS": "1"})


def measure(sides, rounds):
    """sides: {name: (side, question prefix)}. Returns the median seconds of each, taken in turns."""
    counts, times = {}, {name: [] for name in sides}
    for name, (side, prefix) in sides.items():
        guess = statistics.median(side.seconds(prefix + "3"))
        counts[name] = max(LEAST_STEPS, min(MOST_STEPS, round(SECONDS_PER_ROUND / guess)))
    for number in range(rounds):
        order = list(sides.items())
        for name, (side, prefix) in order if number % 2 == 0 else reversed(order):
            times[name].append(statistics.median(side.seconds(f"{prefix}{counts[name]}")))
    return {name: statistics.median(values) for name, values in times.items()}


def report(name, ratio, raw):
    print(f"{name} {ratio:.3f} x ({raw})", flush=True)


def compare_pipelines(binaries, model, microbatches, rounds):
    torch = torch_side(model, microbatches, PIPELINES)
    smp = smp_side(binaries, model, microbatches, "pipeline")
    times = measure({"smp": (smp, ""), **{kind: (torch, kind + " ") for kind in PIPELINES}}, rounds)
    smp.close(), torch.close()
    best = min(PIPELINES, key=times.get)
    ratio = times[best] / times["smp"]
    all_of_them = ", ".join(f"{kind} {times[kind] * 1e3:.2f} ms" for kind in PIPELINES)
    report(f"vs_tdp_{model}_m{microbatches}", ratio,
           f"smp {times['smp'] * 1e3:.2f} ms, predicted {float(smp.says[1]) * 1e3:.2f} ms; {all_of_them}")
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--microbatches", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    for microbatches in arguments.microbatches or [4, 8]:
        ratios = [compare_pipelines(arguments.binaries, model, microbatches, arguments.rounds)
                  for model in arguments.models]
        geomean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        report(f"vs_tdp_geomean_m{microbatches}", geomean, f"lowest {min(ratios):.3f}")


if __name__ == "__main__":
    main()
