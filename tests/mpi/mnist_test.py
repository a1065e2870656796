"""Trains mnist in worlds of 1 to 4 processes, on IDX files made here and on the digits that the build has prepared.

Usage: mnist_test.py MNIST SMP DIGITS MUST_HAVE_DIGITS
"""

import pathlib
import random
import re
import struct
import subprocess
import sys
import time

import example_runs

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples/mnist"))
import prepare_digits

SIZE, NUM_TRAIN, NUM_TEST = 8, 50, 21
TRAINING = ["--steps=8", "--epochs=9", "--batch-size=8", "--channels-1=4", "--channels-2=6", "--hidden=12"]


def write_idx(path, sizes, data):
    path.write_bytes(struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes) + bytes(data))


def write_images(folder, size=SIZE):
    """Digit d is a bright row d % size in noise: something to learn, the same in every run."""
    draw = random.Random(1)
    folder.mkdir()
    for split, count in (("train", NUM_TRAIN), ("t10k", NUM_TEST)):
        labels = [draw.randrange(10) for _ in range(count)]
        pixels = [min(255, draw.randrange(90) + 160 * (row == label % size)) for label in labels for row in range(size)
                  for _ in range(size)]
        write_idx(folder / f"{split}-images-idx3-ubyte", (count, size, size), pixels)
        write_idx(folder / f"{split}-labels-idx1-ubyte", (count,), labels)
    return folder


class Mnist(example_runs.ExampleTestCase):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.images = write_images(cls.folder / "images")
        cls.reference = cls.train_small(1)

    @classmethod
    def train_small(cls, num_ranks, *flags):
        return cls.train(num_ranks, *TRAINING, f"--data={cls.images}", *flags)

    def test_losses_and_the_test_are_those_of_one_process(self):
        for placed in ("auto", "manual"):
            for num_ranks in (2, 3, 4):
                with self.subTest(num_ranks=num_ranks, placed=placed):
                    log = self.train_small(num_ranks, f"--partition={placed}")
                    self.check_same(log, f"{num_ranks} processes, {placed}")
                    self.assertEqual(len(log.head["plan"]["stages"]), num_ranks)

    def test_losses_do_not_depend_on_the_schedule(self):
        self.check_same(self.train_small(3, "--schedule=simple"), "simple")

    def test_replicas_with_half_the_microbatches_agree_with_one_pipeline(self):
        for num_ranks, degree in ((2, 1), (4, 2)):
            with self.subTest(num_ranks=num_ranks, degree=degree):
                log = self.train_small(num_ranks, f"--pipeline-degree={degree}", "--microbatches=2")
                for got, expected in zip(log.losses, self.reference.losses):
                    self.assertAlmostEqual(float(got), float(expected), delta=1e-4 * float(expected))
                self.assertEqual(log.summary["test_accuracy"], self.reference.summary["test_accuracy"])

    def test_every_image_of_the_test_counts_once(self):
        """21 images, in batches of 8 and of 12."""
        correct = float(self.reference.summary["test_accuracy"]) * NUM_TEST
        self.assertAlmostEqual(correct, round(correct), places=6)
        other = self.train(2, f"--data={self.images}", "--batch-size=12", "--steps=1")
        correct = float(other.summary["test_accuracy"]) * NUM_TEST
        self.assertAlmostEqual(correct, round(correct), places=6)
        self.assertIn(f"\n{round(correct)} of {NUM_TEST} test images", self.output)

    def test_images_of_28_by_28(self):
        large = write_images(self.folder / "large", size=28)
        alone, together = (self.train(n, *TRAINING, f"--data={large}") for n in (1, 3))
        self.assertEqual(alone.losses, together.losses)

    def test_log_has_steps_and_summary(self):
        self.assertEqual([step["step"] for step in self.reference.steps], list(range(1, 9)))
        for step in self.reference.steps:
            self.assertEqual(list(step), ["step", "loss", "step_s", "images_per_s"])
            self.assertAlmostEqual(float(step["images_per_s"]) * float(step["step_s"]), 8, places=3)
        self.assertEqual(list(self.reference.summary), ["test_loss", "test_accuracy"])

    def test_bad_data_and_flags_are_refused(self):
        self.check_refused("mnist: expected a folder with IDX files, got /no/such/folder", 2, "--data=/no/such/folder")
        self.check_refused("expected at most the 50 training images", 2, f"--data={self.images}", "--batch-size=64")
        self.check_refused("expected a batch size divisible by", 2, f"--data={self.images}", "--batch-size=6")

    def test_digits_are_prepared_alike_each_time(self):
        images = [[[i % 17, 16], [0, i % 7]] for i in range(1797)]
        for name in ("first", "second"):
            (self.folder / name).mkdir()
            prepare_digits.prepare(self.folder / name, images, [i % 10 for i in range(1797)])
        files = {path.name: path.read_bytes() for path in (self.folder / "first").iterdir()}
        self.assertEqual(files, {path.name: path.read_bytes() for path in (self.folder / "second").iterdir()})
        self.assertEqual({name: len(data) for name, data in files.items()},
                         {"train-images-idx3-ubyte": 16 + 4 * 1437, "train-labels-idx1-ubyte": 8 + 1437,
                          "t10k-images-idx3-ubyte": 16 + 4 * 360, "t10k-labels-idx1-ubyte": 8 + 360})
        ink = files["t10k-images-idx3-ubyte"][16:]
        self.assertEqual((set(ink[1::4]), set(ink[2::4]), max(ink[0::4])), ({255}, {0}, 255))

    def test_no_scikit_learn_is_said_and_is_an_error_unless_asked_otherwise(self):
        without_packages = [sys.executable, "-I", "-S", prepare_digits.__file__, self.folder / "none"]
        for flags, code in (((), 1), (("--if-possible",), 0)):
            done = subprocess.run([*without_packages, *flags], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, (self.folder / "none").exists()), (code, False))
            self.assertIn("-m pip install scikit-learn, or give mnist --data FOLDER", done.stderr)

    def test_reads_digits_of_real_hands(self):
        if not (DIGITS / "t10k-labels-idx1-ubyte").exists():
            assert not MUST_HAVE_DIGITS, f"expected digits in {DIGITS}; prepare_digits.py writes them"
            self.skipTest(f"no digits in {DIGITS}: the build's Python has no scikit-learn")
        start = time.monotonic()
        log = self.train(2, f"--data={DIGITS}")
        print(f"accuracy {log.summary['test_accuracy']} after {time.monotonic() - start:.1f} s", file=sys.stderr)
        self.assertGreater(float(log.summary["test_accuracy"]), 0.95)
        self.assertRegex(self.output, re.compile(r"^\d+ of 360 test images", re.MULTILINE))


if __name__ == "__main__":
    *ARGUMENTS, DIGITS, MUST_HAVE_DIGITS = sys.argv[1:]
    DIGITS, MUST_HAVE_DIGITS = pathlib.Path(DIGITS), MUST_HAVE_DIGITS in ("1", "ON", "TRUE")
    example_runs.main(Mnist, ARGUMENTS)
