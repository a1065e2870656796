"""Trains gan in worlds of 1 to 3 processes, and compares what --log has written.

Usage: gan_test.py GAN SMP
"""

import re
import sys

import example_runs

STEPS = 60
TRAINING = [f"--steps={STEPS}", "--batch-size=64", "--print-every=0"]


def losses_of(log):
    return [(step["loss"], step["generator_loss"]) for step in log.steps]


class Gan(example_runs.ExampleTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.reference = cls.train(1, *TRAINING)

    def test_losses_of_both_networks_are_those_of_one_process(self):
        for placed in ("auto", "manual"):
            for num_ranks in (2, 3):
                with self.subTest(num_ranks=num_ranks, placed=placed):
                    log = self.train(num_ranks, *TRAINING, f"--partition={placed}")
                    self.assertEqual(losses_of(log), losses_of(self.reference))
                    self.assertEqual(log.summary, self.reference.summary)
                    num_stages = 2 if placed == "manual" else num_ranks
                    self.assertEqual(len(log.head["plan"]["stages"]), num_stages)

    def test_losses_do_not_depend_on_the_schedule(self):
        log = self.train(2, *TRAINING, "--schedule=simple")
        self.assertEqual(losses_of(log), losses_of(self.reference))

    def test_replicas_agree_with_one_pipeline(self):
        """They add in another order; two networks that play against each other make more of it with every step."""
        log = self.train(2, "--steps=10", *TRAINING[1:], "--pipeline-degree=1", "--microbatches=1")
        for got, expected in zip(losses_of(log), losses_of(self.reference)):
            for a, b in zip(got, expected):
                self.assertAlmostEqual(float(a), float(b), delta=1e-4)

    def test_log_has_both_losses(self):
        self.assertEqual([step["step"] for step in self.reference.steps], list(range(1, STEPS + 1)))
        for step in self.reference.steps:
            self.assertEqual(list(step), ["step", "loss", "step_s", "generator_loss", "points_per_s"])

    def test_all_modes_are_covered(self):
        """Eight of eight here; another processor rounds otherwise."""
        log = self.train(1)
        self.assertGreaterEqual(float(log.summary["modes"]), 7)
        self.assertGreater(float(log.summary["near_mode"]), 0.7)
        self.assertRegex(self.output, re.compile(r"^[78] of 8 modes are covered, \d+ % of the points are near one$", re.M))
        self.assertEqual(len(re.findall(r"^step +\d+ \| .* \| modes \d of 8 \| near one +\d+ %$", self.output, re.M)), 6)

    def test_flags_of_data_are_refused(self):
        self.check_refused("--data", 1, "--data=folder")


if __name__ == "__main__":
    example_runs.main(Gan, sys.argv[1:])
