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
        self.is_closed = False

    def close(self):
        self.is_closed = True

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

    def test_a_ratio_is_the_median_of_the_rounds_ratios(self):
        times = {"smp": [1, 2, 4], "ddp": [2, 2, 40]}
        self.assertEqual(run.ratio_of(times, "ddp", "smp"), 2)

    def test_a_prediction_is_compared_with_the_first_steps_of_its_job(self):
        sides = []

        def start():
            sides.append(Side(0.55, 0.4, 0.5))  # the prediction, how long a step takes, steps
            return sides[-1]

        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            run.compare_prediction(start, "net")
        self.assertEqual([side.questions for side in sides], [[run.PREDICTION, "3", "2"]] * run.INSTANCES)
        self.assertTrue(all(side.is_closed for side in sides))
        self.assertEqual(printed.getvalue(), "predicted_net 1.100 x (550.00 ms for 500.00 ms)\n")


@mock.patch.object(run, "stolen_seconds", lambda: 0.0)
class Choice(unittest.TestCase):
    def setUp(self):
        """smp has chosen two replicas with two microbatches each. Of one microbatch each, the first instance is fast by chance."""
        answers = {("pipeline", 16): [0.2], ("replicas", 1): [0.099, 0.105, 0.106], ("replicas", 2): [0.101, 0.102],
                   ("replicas", 4): [0.11, 0.11, 0.109]}
        self.started = {}
        self.contest = run.Contest.__new__(run.Contest)
        self.contest.model, self.contest.rounds, self.contest.smp = "net", 2, self.start
        self.contest.microbatches = run.MICROBATCHES
        self.contest.chosen = Side(0.1)
        self.contest.chosen.says = ["ready", "2x1x4"]
        self.contest.pipelines = {4: Side(0.3), 8: Side(0.3)}
        self.answers = {layout: iter(seconds) for layout, seconds in answers.items()}

    def start(self, count, layout):
        side = Side(next(self.answers[layout, count]))
        self.started.setdefault((layout, count), []).append(side)
        return side

    def choice(self):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            self.contest.choice()
        return printed.getvalue()

    def test_near_layouts_are_judged_by_several_instances(self):
        self.assertIn("smp_choice_net 0.962 x (smp 101.00 ms, replicas 1 105.00 ms; ", self.choice())
        self.assertEqual({layout: len(sides) for layout, sides in self.started.items()},
                         {("pipeline", 16): 1, ("replicas", 1): 3, ("replicas", 2): 2, ("replicas", 4): 1})

    def test_slow_layouts_are_out_after_the_first_rounds_but_never_smp_itself(self):
        self.contest.chosen = Side(0.3)
        self.contest.chosen.says = ["ready", "2x1x4"]
        self.choice()
        rounds = {"slow": len(self.started["replicas", 4][0].questions), "near": len(self.started["replicas", 1][0].questions)}
        self.assertEqual(rounds, {"slow": 1 + 2, "near": 1 + 2 + 1 + 4})  # each time a question more, for a guess
        self.assertEqual(len(self.started["replicas", 2]), 2)

    def test_ends_what_it_has_started_and_nothing_else(self):
        self.choice()
        self.assertTrue(all(side.is_closed for sides in self.started.values() for side in sides))
        self.assertFalse(any(side.is_closed for side in (self.contest.chosen, *self.contest.pipelines.values())))


if __name__ == "__main__":
    unittest.main()
