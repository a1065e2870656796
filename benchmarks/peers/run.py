"""Measures smp against torch on the same two cores: both sides' processes live side by side, and all but one sleep.

make peers                                 the six models, pipelines of 4 and 8 microbatches, and the best of all
python run.py BUILD/bin [MODEL ...]        some of them; --rounds 5 --microbatches 8
python run.py BUILD/bin --python           smp in Python, pipelines of 8 microbatches; PYTHONPATH has the package

For each model the contenders take turns of a quarter of a second (40 steps at most, one at least) in a random order, --rounds
times; a turn's time is the median of its steps, a ratio the median of the rounds' ratios: a machine that changes its speed does so
for all. Rounds in which the host of a virtual machine takes much of its time are taken again. Prints the raw times, medians of the
rounds, and the ratio: above 1, smp is faster.

vs_tdp_*         a pipeline of two ranks against the best schedule of torch.distributed.pipelining, same microbatches
vs_torch_best_*  smp with everything left to it against the fastest of what torch offers
smp_choice_*     what smp has chosen for itself against the fastest of its own layouts, each in --instances; 1: none is faster
predicted_*      predicted over measured time of a step, each of a job that has just begun
vs_tdp_py_*      and vs_torch_best_py_*: the first two with smp in Python. DDP over torch.compile is timed beside them, and
                 is no peer: it computes other bits
"""
import argparse
import collections
import contextlib
import math
import os
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
PIPELINES = ["gpipe", "1f1b", "interleaved"]
COMPILED = "ddp-compiled"
WORLD = 2
MICROBATCHES = [4, 8]
MICROBATCHES_IN_PYTHON = [8]
OTHER_LAYOUTS = [("pipeline", 16), ("replicas", 1), ("replicas", 2), ("replicas", 4)]
BATCH = {"gpt2": 8}  # where it is less than the most microbatches above
MODELS = ["lm-small", "lm-medium", "mlp-tiny", "mlp-wide", "gpt2", "resnet"]
SECONDS_PER_TURN = 0.25
MOST_STEPS = 40  # of one turn
SECONDS_OF_PREDICTED = 1  # steps that a prediction is compared with
PREDICTION = "0"  # the question for one
AGAINST_TORCH = 3  # times the rounds: cheap, and what smp is judged by
NEAR = 1.1  # times the fastest of smp's layouts: the slower ones are measured in the first rounds only
INSTANCES = 3  # of each that is near: with another piece of memory the same layout takes up to a twentieth longer, or less
AMONG_NEAR = 2  # times the rounds, for each of these
MOST_STOLEN = 0.05  # of the cores' time in a round that counts
MOST_REPEATED = 3  # for each round

# What `smp run` sets for its ranks, for torch's as well: huge pages are no merit of either side.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

num_rounds = collections.Counter()


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

    alive = []

    def __init__(self, commands, environment):
        Side.alive.append(self)
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

    @staticmethod
    def kill_all():
        while Side.alive:
            with contextlib.suppress(ProcessLookupError):
                Side.alive.pop()._signal(signal.SIGKILL)

    def close(self):
        Side.alive.remove(self)
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


def smp_side(binaries, program, model, microbatches, layout):
    command = [binaries / "smp", "run", "-np", "2", *program, model, microbatches, layout]
    return Side([[str(word) for word in command]], ENVIRONMENT)


def torch_side(model, microbatches, contenders):
    port = free_port()
    commands = [[sys.executable, str(HERE / "peer.py"), str(rank), port, model, str(microbatches), *contenders]
                for rank in (0, 1)]
    return Side(commands, ENVIRONMENT)


def steps_of_turn(seconds):
    return max(1, min(MOST_STEPS, round(SECONDS_PER_TURN / seconds)))


KEEP_AWAKE = """
import os
while os.getppid() == {parent}:
    for _ in range(1000000):
        os.sched_yield()
"""


@contextlib.contextmanager
def awake_cores():
    """Every core has something to do, which gives way to anything else. A virtual core that halts is given away, and on a busy
    host comes back late: that hits who sleeps while it waits, which torch's processes do. As idle=poll on a machine of one's own.
    They yield at once, for a rank of smp's that yields while it waits would else miss its message by a slice of theirs."""
    busy = []
    try:
        for core in os.sched_getaffinity(0):
            busy.append(subprocess.Popen([sys.executable, "-c", KEEP_AWAKE.format(parent=os.getpid())]))
            os.sched_setaffinity(busy[-1].pid, [core])
            os.sched_setscheduler(busy[-1].pid, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def stolen_seconds():
    """What the host of a virtual machine has taken of all cores' time so far; 0 on a machine of one's own."""
    with open("/proc/stat") as stat:
        return int(stat.readline().split()[8]) / os.sysconf("SC_CLK_TCK")


def undisturbed(rounds, take):
    """The results of so many calls of `take`. A round in which the host takes more than MOST_STOLEN is taken again, as often as
    MOST_REPEATED times `rounds`; after that all count."""
    results, num_repeated = [], 0
    while len(results) < rounds:
        begin, stolen = time.monotonic(), stolen_seconds()
        result = take()
        share = (stolen_seconds() - stolen) / (time.monotonic() - begin) / os.cpu_count()
        is_disturbed = share > MOST_STOLEN
        if is_disturbed and num_repeated < MOST_REPEATED * rounds:
            num_repeated += 1
            continue
        results.append(result)
        num_rounds["disturbed" if is_disturbed else "undisturbed"] += 1
    num_rounds["repeated"] += num_repeated
    return results


def measure(sides, rounds):
    """sides: {name: (side, question prefix)}. Returns the seconds of each by round, taken in turns."""
    counts, times = {}, {name: [] for name in sides}
    for name, (side, prefix) in sides.items():
        guess = statistics.median(side.seconds(prefix + "2"))
        counts[name] = steps_of_turn(guess)
    shuffle = random.Random(0)
    last = None

    def turns():
        nonlocal last
        order = shuffle.sample(list(sides), len(sides))
        if order[0] == last:  # nobody runs twice in a row, which would be warm
            order = order[1:] + order[:1]
        last = order[-1]
        return {name: statistics.median(sides[name][0].seconds(f"{sides[name][1]}{counts[name]}")) for name in order}

    for of_round in undisturbed(rounds, turns):
        for name, seconds in of_round.items():
            times[name].append(seconds)
    return times


def medians(times):
    return {name: statistics.median(values) for name, values in times.items()}


def ratio_of(times, name, other):
    """Of the times of both in each round, the median."""
    return statistics.median(a / b for a, b in zip(times[name], times[other]))


def compare_prediction(start, name, instances=INSTANCES):
    """Each of so many jobs has timed its operators as it began, and runs a second of steps."""
    def take():
        side = start()
        predicted, = side.seconds(PREDICTION)
        count = max(1, round(SECONDS_OF_PREDICTED / statistics.median(side.seconds("3"))))
        measured = statistics.median(side.seconds(str(count)))
        side.close()
        return predicted, measured

    raw = undisturbed(instances, take)
    ratio = statistics.median(predicted / measured for predicted, measured in raw)
    predicted, measured = (statistics.median(column) * 1e3 for column in zip(*raw))
    report(f"predicted_{name}", ratio, f"{predicted:.2f} ms for {measured:.2f} ms")


def report(name, ratio, raw):
    print(f"{name} {ratio:.3f} x ({raw})", flush=True)


def milliseconds(times):
    return ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())


def close_all(sides):
    for side in {id(side): side for side, _ in sides.values()}.values():
        side.close()


class Contest:
    """smp and its peers on one model. All of torch's processes and smp's that are compared with them live at once; those of
    smp's other layouts later, for not all would fit into the memory of a small machine."""

    instances = INSTANCES
    microbatches = MICROBATCHES

    def __init__(self, binaries, model, rounds, is_python=False):
        self.binaries, self.model, self.rounds, self.is_python = binaries, model, rounds, is_python
        self.chosen = self.smp("auto", "auto")
        self.pipelines = {count: self.smp(count, "pipeline") for count in self.microbatches}
        self.against_torch = self.measure_against_torch()

    def smp(self, microbatches, layout):
        program = [sys.executable, HERE / "smp_peer.py"] if self.is_python else [self.binaries / "smp_peer"]
        return smp_side(self.binaries, program, self.model, microbatches, layout)

    def measure_against_torch(self):
        sides = {"smp": (self.chosen, ""), **{f"smp {count}": (side, "") for count, side in self.pipelines.items()}}
        torch = {}
        for count in self.microbatches:
            whole = []  # contenders without microbatches
            if count == self.microbatches[0]:
                whole = ["one", "ddp"] + [COMPILED] * self.is_python
            side = torch_side(self.model, count, whole + PIPELINES)
            torch.update({kind: (side, kind + " ") for kind in whole})
            torch.update({f"{kind} {count}": (side, kind + " ") for kind in PIPELINES})
        times = measure({**sides, **torch}, AGAINST_TORCH * self.rounds)
        close_all(torch)
        return times

    def ratio_to_best(self, own, others):
        """The fastest of the others over smp's own, and the raw times of all."""
        raw = medians({name: self.against_torch[name] for name in (own, *others)})
        return ratio_of(self.against_torch, min(others, key=raw.get), own), milliseconds(raw)

    @property
    def language(self):
        return "py_" if self.is_python else ""

    def vs_tdp(self, microbatches):
        ratio, raw = self.ratio_to_best(f"smp {microbatches}", [f"{kind} {microbatches}" for kind in PIPELINES])
        report(f"vs_tdp_{self.language}{self.model}_m{microbatches}", ratio, raw)
        return ratio

    def vs_torch_best(self):
        peers = [name for name in self.against_torch if not name.startswith("smp") and name != COMPILED]
        ratio, raw = self.ratio_to_best("smp", peers)
        if COMPILED in self.against_torch:
            beside, = medians({COMPILED: self.against_torch[COMPILED]}).values()
            raw += f"; no peer: {COMPILED} {beside * 1e3:.2f} ms"
        report(f"vs_torch_best_{self.language}{self.model}", ratio, raw)
        return ratio

    def choice(self):
        """Layouts of smp's, the chosen one among them, in several instances each: the process that chose and others."""
        replicas, ranks, microbatches = (int(number) for number in self.chosen.says[1].split("x"))
        chosen = ("pipeline", microbatches) if replicas == 1 else ("replicas", microbatches // replicas)
        layouts = {"smp": chosen}
        for layout, count in [("pipeline", count) for count in self.microbatches] + OTHER_LAYOUTS:
            if (layout, count) != chosen and count <= BATCH.get(self.model, count):
                layouts[f"{layout} {count}"] = (layout, count)
        kept = {"smp": self.chosen, **{f"pipeline {count}": side for count, side in self.pipelines.items()}}
        sides = {name: kept.get(name) or self.smp(count, layout) for name, (layout, count) in layouts.items()}
        first = medians(measure({name: (side, "") for name, side in sides.items()}, self.rounds))
        near = [name for name in layouts if name == "smp" or first[name] <= NEAR * min(first.values())]
        times = {name: [] for name in near}
        for instance in range(self.instances):
            if instance > 0:
                sides = {name: self.smp(layouts[name][1], layouts[name][0]) for name in near}
            for name, seconds in measure({name: (sides[name], "") for name in near}, AMONG_NEAR * self.rounds).items():
                times[name] += seconds
            close_all({name: (side, "") for name, side in sides.items() if side not in kept.values()})
        raw = medians(times)
        best = min((name for name in raw if name != "smp"), key=raw.get, default="smp")
        choice = f"{replicas} replicas of {ranks} ranks, {microbatches} microbatches in all"
        report(f"smp_choice_{self.model}", ratio_of(times, "smp", best),
               f"{milliseconds(raw)}; all others took a tenth longer in the first rounds, and more; smp has chosen {choice}")

    def predictions(self):
        for count in self.microbatches:
            compare_prediction(lambda count=count: self.smp(count, "pipeline"), f"{self.model}_m{count}", self.instances)
        compare_prediction(lambda: self.smp("auto", "auto"), f"{self.model}_chosen", self.instances)

    def close(self):
        close_all({number: (side, "") for number, side in enumerate([self.chosen, *self.pipelines.values()])})


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binaries", type=pathlib.Path)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--instances", type=int, default=INSTANCES)
    parser.add_argument("--microbatches", type=int, nargs="+")
    parser.add_argument("--python", action="store_true")
    arguments = parser.parse_args()
    Contest.instances = arguments.instances
    Contest.microbatches = arguments.microbatches or (MICROBATCHES_IN_PYTHON if arguments.python else MICROBATCHES)
    ratios = {}
    try:
        with awake_cores():
            for model in arguments.models:
                if not arguments.python:  # there both sides have the same file of models
                    subprocess.run([sys.executable, HERE / "twins.py", arguments.binaries, model], check=True)
                contest = Contest(arguments.binaries, model, arguments.rounds, arguments.python)
                for count in contest.microbatches:
                    ratios.setdefault(f"vs_tdp_{contest.language}geomean_m{count}", []).append(contest.vs_tdp(count))
                ratios.setdefault(f"vs_torch_best_{contest.language}geomean", []).append(contest.vs_torch_best())
                if arguments.python:
                    contest.close()
                    continue
                contest.choice()
                contest.close()
                contest.predictions()
    finally:
        Side.kill_all()  # stopped ones would stay for ever
    for name, of_models in ratios.items():
        geomean = math.exp(statistics.fmean(math.log(ratio) for ratio in of_models))
        report(name, geomean, f"lowest {min(of_models):.3f}")
    print("rounds: " + ", ".join(f"{count} {kind}" for kind, count in num_rounds.items()))


if __name__ == "__main__":
    main()
