"""Measures smp against torch on the same two cores: both sides' processes live side by side, and all but one sleep.

make peers                                 the six models, pipelines of 4 and 8 microbatches, and the best of all
python run.py BUILD/bin [MODEL ...]        some of them; --microbatches 8 --rounds 5 --best

For each model the contenders take turns, --rounds times; a round is the median of some steps of each, its time the median of
the rounds, a ratio the median of the rounds' ratios: a machine that changes its speed does so for all. Prints both raw times and
the ratio: above 1, smp is faster.

vs_tdp_*         a pipeline of two ranks against the best schedule of torch.distributed.pipelining, same microbatches
vs_torch_best_*  smp with everything left to it against the fastest of what torch offers
smp_choice_*     what smp has chosen for itself against the fastest of its own layouts; 1: none is faster
predicted_*      predicted over measured time of a step, of new processes: median of three
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
NEW_PROCESSES, STEPS_OF_NEW = 3, 8


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
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                if self.leader.args[0] != sys.executable:
                    raise
                process.kill()  # gloo, when the other process has left first
                process.wait()
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
    """sides: {name: (side, question prefix)}. Returns the seconds of each by round, taken in turns."""
    counts, times = {}, {name: [] for name in sides}
    for name, (side, prefix) in sides.items():
        guess = statistics.median(side.seconds(prefix + "3"))
        counts[name] = max(LEAST_STEPS, min(MOST_STEPS, round(SECONDS_PER_ROUND / guess)))
    for number in range(rounds):
        order = list(sides.items())
        for name, (side, prefix) in order if number % 2 == 0 else reversed(order):
            times[name].append(statistics.median(side.seconds(f"{prefix}{counts[name]}")))
    return times


def medians(times):
    return {name: statistics.median(values) for name, values in times.items()}


def ratio_of(times, name, other):
    """Of the times of both in each round, the median."""
    return statistics.median(a / b for a, b in zip(times[name], times[other]))


def compare_prediction(binaries, model, microbatches, layout, name):
    """Of new processes: what they know of the machine's speed holds for the next seconds."""
    ratios, raw = [], []
    for _ in range(NEW_PROCESSES):
        side = smp_side(binaries, model, microbatches, layout)
        predicted, measured = float(side.says[1]), statistics.median(side.seconds(str(STEPS_OF_NEW)))
        side.close()
        ratios.append(predicted / measured)
        raw.append(f"{predicted * 1e3:.2f} ms for {measured * 1e3:.2f} ms")
    report(f"predicted_{name}", statistics.median(ratios), ", ".join(raw))


def report(name, ratio, raw):
    print(f"{name} {ratio:.3f} x ({raw})", flush=True)


def compare_pipelines(binaries, model, microbatches, rounds):
    torch = torch_side(model, microbatches, PIPELINES)
    smp = smp_side(binaries, model, microbatches, "pipeline")
    times = measure({"smp": (smp, ""), **{kind: (torch, kind + " ") for kind in PIPELINES}}, rounds)
    smp.close(), torch.close()
    raw = medians(times)
    ratio = ratio_of(times, min(PIPELINES, key=raw.get), "smp")
    report(f"vs_tdp_{model}_m{microbatches}", ratio, milliseconds(raw))
    compare_prediction(binaries, model, microbatches, "pipeline", f"{model}_m{microbatches}")
    return ratio


TORCH = {4: ["one", "ddp", "gpipe", "1f1b"], 8: PIPELINES}  # by microbatches; the first two have none
OWN = [("pipeline", 4), ("pipeline", 8), ("pipeline", 16), ("replicas", 1), ("replicas", 2), ("replicas", 4)]
BATCH = {"gpt2": 8}  # where it is less than the most microbatches above


def milliseconds(times):
    return ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())


def compare_best(binaries, model, rounds):
    chosen = smp_side(binaries, model, "auto", "auto")

    def against(sides):
        times = measure({"smp": (chosen, ""), **sides}, rounds)
        for side in {id(side): side for side, _ in sides.values()}.values():
            side.close()
        raw = medians(times)
        best = min(sides, key=raw.get)
        return ratio_of(times, best, "smp"), milliseconds(raw)

    # One after the other: the processes of all contenders would not fit into the memory of a small machine.
    torch = {count: torch_side(model, count, contenders) for count, contenders in TORCH.items()}
    ratio, raw = against({f"{kind} {count}": (torch[count], kind + " ") for count, kinds in TORCH.items() for kind in kinds})
    report(f"vs_torch_best_{model}", ratio, raw)

    own = {f"{layout} {count}": smp_side(binaries, model, count, layout)
           for layout, count in OWN if count <= BATCH.get(model, count)}
    best_over_chosen, raw = against({name: (side, "") for name, side in own.items()})
    replicas, ranks, microbatches = chosen.says[2].split("x")
    choice = f"smp has chosen {replicas} replicas of {ranks} ranks, {microbatches} microbatches in all"
    report(f"smp_choice_{model}", 1 / best_over_chosen, f"{raw}; {choice}")
    chosen.close()
    compare_prediction(binaries, model, "auto", "auto", f"{model}_chosen")
    return ratio


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--microbatches", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--best", action="store_true", help="only the comparison with the best of torch")
    arguments = parser.parse_args()

    def compare(name, contest):
        ratios = [contest(model) for model in arguments.models]
        geomean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        report(name, geomean, f"lowest {min(ratios):.3f}")

    for count in [] if arguments.best else arguments.microbatches or [4, 8]:
        compare(f"vs_tdp_geomean_m{count}",
                lambda model: compare_pipelines(arguments.binaries, model, count, arguments.rounds))
    if arguments.best or not arguments.microbatches:
        compare("vs_torch_best_geomean", lambda model: compare_best(arguments.binaries, model, arguments.rounds))


if __name__ == "__main__":
    main()
