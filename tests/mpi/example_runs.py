"""Runs of the programs of examples/ for tests, and the logs that they write."""

import json
import pathlib
import subprocess
import tempfile
import unittest

import worlds

TIMEOUT_S = 150 * worlds.SLOWNESS  # many times what a run takes on two cores of its own


class Log:
    """The lines of a log; numbers as the text that stands there."""

    def __init__(self, path):
        head, *steps, tail = [json.loads(line, parse_float=str) for line in path.read_text().splitlines()]
        self.head, self.steps, self.summary = head, steps, tail["summary"]
        self.losses = [str(step["loss"]) for step in steps]


class ExampleTestCase(unittest.TestCase):
    """`self.output` is what the last run has printed; `cls.reference` the log that others are compared with."""

    program, smp = "", ""

    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.temporary.name)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    @classmethod
    def start(cls, num_ranks, *flags):
        command = [cls.smp, "run", "-np", str(num_ranks), "--timeout", str(TIMEOUT_S), cls.program, *flags]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        cls.output = done.stdout
        return done.returncode

    @classmethod
    def train(cls, num_ranks, *flags):
        """The log of a run that ends well."""
        path = cls.folder / "log"
        code = cls.start(num_ranks, f"--log={path}", *flags)
        assert code == 0, f"{cls.program} {flags} on {num_ranks} processes ended with {code}:\n{cls.output}"
        return Log(path)

    def check_same(self, log, what=""):
        self.assertEqual(log.losses, self.reference.losses, what)
        self.assertEqual(log.summary, self.reference.summary, what)

    def check_refused(self, expected, num_ranks, *flags):
        self.assertNotEqual(self.start(num_ranks, *flags), 0)
        self.assertIn(expected, self.output)


def main(test_case, arguments):
    """Runs the tests of the calling script. arguments: PROGRAM SMP"""
    test_case.program, test_case.smp = arguments
    unittest.main(argv=["test"], verbosity=2)
