"""Trains variable_length in worlds of 1 to 3 processes, and compares what --log has written.

Usage: variable_length_test.py VARIABLE_LENGTH SMP
"""

import random
import re
import sys

import example_runs

# Tokens of a line with its end, so that they fill lengths of 4, 8 and 12.
LENGTHS = (4, 8, 12)
TRAINING = ["--epochs=2", "--batch-size=8", "--width=16", "--heads=2", "--hidden=24", "--max-length=12"]


def write_text(path, num_lines=400):
    """Words that come in a fixed order: something to learn, the same in every run. Lines of all lengths, everywhere."""
    draw = random.Random(1)
    lines = []
    for _ in range(num_lines):
        first, count = draw.randrange(20), draw.randrange(2, 12)
        lines.append(" ".join(f"w{(first + i) % 20}" for i in range(count)))
    path.write_text("\n".join(lines) + "\n")
    return path


class VariableLength(example_runs.ExampleTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.text = write_text(cls.folder / "text")
        cls.reference = cls.train_small(1)

    @classmethod
    def train_small(cls, num_ranks, *flags):
        return cls.train(num_ranks, *TRAINING, f"--data={cls.text}", *flags)

    def test_losses_and_graphs_are_those_of_one_process(self):
        for placed in ("auto", "manual"):
            for num_ranks in (2, 3):
                with self.subTest(num_ranks=num_ranks, placed=placed):
                    self.check_same(self.train_small(num_ranks, f"--partition={placed}"))

    def test_losses_do_not_depend_on_the_schedule(self):
        self.check_same(self.train_small(2, "--schedule=simple"))

    def test_replicas_with_half_the_microbatches_agree_with_one_pipeline(self):
        """They add in another order: 1e-6 relative at the first step, 1e-4 at the last."""
        log = self.train_small(2, "--pipeline-degree=1", "--microbatches=2")
        for at, tolerance in ((0, 1e-6), (-1, 1e-4)):
            expected = float(self.reference.losses[at])
            self.assertAlmostEqual(float(log.losses[at]), expected, delta=tolerance * expected)
        self.assertEqual(log.summary["graphs"], self.reference.summary["graphs"])

    def test_each_length_makes_one_graph_in_training_and_one_in_evaluation(self):
        self.assertEqual(sorted({int(step["length"]) for step in self.reference.steps}), list(LENGTHS))
        self.assertEqual(int(self.reference.summary["graphs"]), 2 * len(LENGTHS))
        self.train_small(2)
        graphs = re.findall(r"^epoch .* \| (\d+) graphs$", self.output, re.M)
        self.assertEqual(graphs, [str(2 * len(LENGTHS))] * 2, "none after the first epoch")
        self.assertRegex(self.output, re.compile(r"^test perplexity [\d.]+ \| 6 graphs were made, for 3 lengths in training and 3 in ", re.M))

    def test_it_learns(self):
        losses = [float(loss) for loss in self.reference.losses]
        self.assertLess(sum(losses[-10:]), 0.8 * sum(losses[:10]))

    def test_lengths_that_are_no_multiple_are_refused(self):
        self.check_refused("expected a greatest length that is a multiple of the width of buckets, got 10 and 4", 2,
                           f"--data={self.text}", "--max-length=10")
        self.check_refused("--batch-size: expected at most as many lines as a bucket has, got 512", 1,
                           f"--data={self.text}", "--batch-size=512")


if __name__ == "__main__":
    example_runs.main(VariableLength, sys.argv[1:])
