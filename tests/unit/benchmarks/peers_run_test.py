"""What benchmarks/peers/run.py counts: which rounds, and what it says of them."""
import contextlib
import io
import itertools
import os
import pathlib
import sys
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "peers"))
import run  # noqa: E402


class Undisturbed(unittest.TestCase):
    def setUp(self):
        run.num_rounds.clear()

    def results_of(self, shares, rounds):
        """Of rounds of a second each, of which the host takes these shares of the cores' time."""
        clock = itertools.cycle([0, 1])
        stolen = itertools.chain.from_iterable((0, share * run.os.cpu_count()) for share in shares)
        numbers = itertools.count()
        with mock.patch.object(run.time, "monotonic", lambda: next(clock)), \
                mock.patch.object(run, "stolen_seconds", lambda: next(stolen)):
            return run.undisturbed(rounds, lambda: next(numbers))

    def test_takes_rounds_again_in_which_the_host_takes_the_cores(self):
        self.assertEqual(self.results_of([0.02, 0.3, 0.04, 0.06, 0], 3), [0, 2, 4])
        self.assertEqual(dict(run.num_rounds), {"undisturbed": 3, "repeated": 2})

    def test_gives_up_in_the_end_and_says_so(self):
        last = run.MOST_REPEATED * 2
        self.assertEqual(self.results_of(itertools.repeat(0.5), 2), [last, last + 1])
        self.assertEqual(dict(run.num_rounds), {"disturbed": 2, "repeated": last})


class AwakeCores(unittest.TestCase):
    def test_have_one_process_each_that_gives_way_to_others(self):
        with run.awake_cores():
            busy = [pid for pid in run.descendants(os.getpid()) if pid != os.getpid()]
            self.assertEqual([os.sched_getscheduler(pid) for pid in busy], [os.SCHED_IDLE] * len(busy))
            cores = [os.sched_getaffinity(pid) for pid in busy]
            self.assertEqual(sorted(cores, key=min), [{core} for core in sorted(os.sched_getaffinity(0))])
        self.assertEqual(run.descendants(os.getpid()), [os.getpid()])


class Side:
    """Answers with the seconds of a step, which differ from question to question."""

    def __init__(self, *answers):
        self.answers = itertools.cycle(answers)
        self.questions = []

    def seconds(self, question):
        self.questions.append(question)
        return [next(self.answers)]


@mock.patch.object(run, "stolen_seconds", lambda: 0.0)
class Measure(unittest.TestCase):
    def test_a_turn_takes_a_quarter_of_a_second_or_one_step(self):
        for seconds, steps in ((0.001, 40), (0.05, 5), (3, 1)):
            self.assertEqual(run.steps_of_turn(seconds), steps)

    def test_every_side_has_one_turn_per_round(self):
        sides = {name: (Side(0.05), prefix) for name, prefix in (("smp", ""), ("ddp", "ddp "), ("one", "one "))}
        times = run.measure(sides, 4)
        self.assertEqual(times, {name: [0.05] * 4 for name in sides})
        self.assertEqual(sides["ddp"][0].questions, ["ddp 2"] + ["ddp 5"] * 4)

    def test_slow_layouts_are_out_after_the_first_rounds_but_never_smp_itself(self):
        sides = {"smp": (Side(0.3), ""), "near": (Side(0.105), ""), "fast": (Side(0.1), ""), "slow": (Side(0.2), "")}
        times = run.measure(sides, 2, near=1.1)
        self.assertEqual({name: len(values) for name, values in times.items()}, {"smp": 14, "near": 14, "fast": 14})
        self.assertEqual(len(sides["slow"][0].questions), 3)

    def test_a_ratio_is_the_median_of_the_rounds_ratios(self):
        times = {"smp": [1, 2, 4], "ddp": [2, 2, 40]}
        self.assertEqual(run.ratio_of(times, "ddp", "smp"), 2)

    def test_a_prediction_is_compared_with_the_steps_before_it_and_behind_it(self):
        side = Side(0.5, 0.4, 0.55, 0.6)  # how long a step takes, steps before, the prediction, steps behind
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run.compare_prediction(side, 1, "net")
        self.assertEqual(side.questions, ["3", "2", run.PREDICTION, "2"])
        self.assertEqual(printed.getvalue(), "predicted_net 1.100 x (550.00 ms for 500.00 ms)\n")


if __name__ == "__main__":
    unittest.main()
