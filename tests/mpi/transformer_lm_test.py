"""Trains transformer_lm in worlds of 1 to 4 processes, and compares what --log has written.

Usage: transformer_lm_test.py TRANSFORMER_LM SMP [FLAG ...], the flags of all runs. The model is small and the text short; a
step is what it is in the real job: dropout, clipping, a learning rate that falls, epochs that end with a shorter batch and an
evaluation.
"""

import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

import worlds
from example_runs import Log

STEPS = 50
BATCH, MICROBATCHES, BPTT = 16, 4, 8
MODEL = ["--width=16", "--heads=2", "--hidden=24", "--layers=4", f"--bptt={BPTT}"]
TRAINING = [f"--steps={STEPS}", "--epochs=9", f"--batch-size={BATCH}", "--print-every=0"]
TIMEOUT_S = 60 * worlds.SLOWNESS
STEP_FIELDS = ["step", "loss", "step_s", "tokens_per_s"]


def write_text(path, num_lines=300):
    """Lines of words that come in a fixed order with gaps: something to learn, the same in every run."""
    draw = random.Random(1)
    lines = []
    for _ in range(num_lines):
        first = draw.randrange(40)
        lines.append(" ".join(f"w{(first + i) % 40}" for i in range(12) if draw.random() < 0.9))
    path.write_text("\n".join(lines) + "\n")


def write_splits(text, folder):
    """The same text as a folder: 90, 5 and 5 percent, cut at ends of lines, as the example cuts a file."""
    train = text.index("\n", len(text) // 10 * 9) + 1
    valid = text.index("\n", max(train, len(text) // 20 * 19)) + 1
    folder.mkdir()
    for name, split in (("train", text[:train]), ("valid", text[train:valid]), ("test", text[valid:])):
        (folder / f"wiki.{name}.tokens").write_text(split)


class TransformerLm(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)
        cls.text = cls.folder / "text"
        write_text(cls.text)
        cls.reference = cls.train(1)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def train(cls, num_ranks, *flags, data=None, microbatches=MICROBATCHES):
        path = cls.folder / "log"
        command = [SMP, "run", "-np", str(num_ranks), "--timeout", str(TIMEOUT_S), PROGRAM, *MODEL, *TRAINING,
                   f"--microbatches={microbatches}", f"--data={data or cls.text}", f"--log={path}", *FLAGS, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        return Log(path)

    def check_same_nine_digits(self, log, what):
        self.assertEqual(log.losses, self.reference.losses, what)

    def check_close(self, log, what):
        """Replicas add in another order: 1e-6 relative at the first step, 1e-4 at the last."""
        for at, tolerance in ((0, 1e-6), (-1, 1e-4)):
            got, expected = float(log.losses[at]), float(self.reference.losses[at])
            self.assertLess(abs(got - expected), tolerance * expected, f"{what}, step {log.steps[at]['step']}")

    def test_losses_are_those_of_one_process(self):
        for num_ranks in (1, 2, 3, 4):
            for schedule in ("interleaved", "simple"):
                with self.subTest(num_ranks=num_ranks, schedule=schedule):
                    log = self.train(num_ranks, f"--schedule={schedule}")
                    self.check_same_nine_digits(log, f"{num_ranks} processes, {schedule}")
                    self.assertEqual(len(log.head["plan"]["stages"]), num_ranks)

    def test_losses_are_those_of_a_model_constructed_at_once(self):
        for num_ranks in (1, 2, 4):
            with self.subTest(num_ranks=num_ranks):
                log = self.train(num_ranks, "--preset=tutorial", "--min-vocab=2")
                self.check_same_nine_digits(log, f"{num_ranks} processes, delayed initialisation")
                self.assertEqual(log.summary["test_loss"], self.reference.summary["test_loss"])

    def test_presets_are_checked_and_no_evaluation_is_asked_for(self):
        done = subprocess.run([PROGRAM, "--preset=large"], capture_output=True, text=True, check=False)
        self.assertEqual((done.returncode, done.stderr), (2, "--preset: expected small|tutorial, got large\n"))
        log = self.train(1, "--no-evaluation")
        self.assertEqual(log.losses, self.reference.losses)
        self.assertNotIn("test_loss", log.summary)

    def test_losses_do_not_depend_on_who_places_the_modules(self):
        for num_ranks in (2, 4):
            with self.subTest(num_ranks=num_ranks):
                log = self.train(num_ranks, "--partition=manual")
                self.check_same_nine_digits(log, f"{num_ranks} processes, placed by hand")

    def test_replicas_with_half_the_microbatches_agree_with_one_pipeline(self):
        for num_ranks, degree in ((2, 1), (4, 2)):
            with self.subTest(num_ranks=num_ranks, degree=degree):
                log = self.train(num_ranks, f"--pipeline-degree={degree}", microbatches=MICROBATCHES // 2)
                self.check_close(log, f"two replicas of {degree} stages")

    def test_losses_depend_on_dropout_and_seed_and_fall(self):
        losses = [float(loss) for loss in self.reference.losses]
        self.assertLess(sum(losses[-5:]), 0.8 * sum(losses[:5]))
        for flag in ("--dropout=0", "--seed=1"):
            changed = self.train(1, flag).losses
            self.assertTrue(all(a != b for a, b in zip(changed, self.reference.losses)), flag)

    def test_a_folder_of_splits_is_read_as_the_same_text_in_one_file(self):
        folder = self.folder / "splits"
        write_splits(self.text.read_text(), folder)
        log = self.train(1, data=folder)
        self.check_same_nine_digits(log, "folder")
        for name in ("valid_loss", "test_loss"):
            self.assertEqual(log.summary[name], self.reference.summary[name])

    def test_log_has_configuration_plan_steps_and_summary(self):
        log = self.train(2)
        self.assertEqual(sorted(log.head), ["config", "plan"])
        self.assertEqual(log.head["config"]["microbatches"], MICROBATCHES)
        self.assertEqual([step["step"] for step in log.steps], list(range(1, STEPS + 1)))
        full, short = 0, 0
        for step in log.steps:
            self.assertEqual(list(step), STEP_FIELDS)
            tokens = float(step["tokens_per_s"]) * float(step["step_s"]) / BATCH
            full, short = full + (round(tokens, 3) == BPTT), short + (round(tokens, 3) < BPTT)
        self.assertGreater(full, 0)
        self.assertEqual((full + short, short > 0), (STEPS, True), "every epoch ends with a shorter batch")
        figures = ["predicted_step_s", "measured_step_s", "valid_loss", "test_loss", "test_perplexity"]
        figures += [f"{kind}_peak_mib_rank_{rank}" for kind in ("predicted", "measured") for rank in (0, 1)]
        for name in figures:
            self.assertGreater(float(log.summary[name]), 0, name)


if __name__ == "__main__":
    PROGRAM, SMP, *FLAGS = sys.argv[1:]
    unittest.main(argv=["test"], verbosity=2)
