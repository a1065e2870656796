"""torchrun starts scripts without MPI, and its summary names the cause of a failure."""

import os
import pathlib
import subprocess
import unittest

from forked import ForkedScripts

SCRIPT = pathlib.Path(__file__).with_name("torchrun_script.py")


TORCHRUN = "torch.distributed.run"
scripts = ForkedScripts(TORCHRUN)
unittest.addModuleCleanup(scripts.close)


def run(mode, forks=True):
    # No mpirun in sight: not even on the path.
    torchrun = scripts.command("-m", TORCHRUN, "--standalone", "--nproc-per-node", "2")
    command = [*torchrun, *(["--no-python", *scripts.command(SCRIPT, mode)] if forks else [str(SCRIPT), mode])]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": "/nowhere"})


class Torchrun(unittest.TestCase):
    def test_trains_as_the_plain_loop(self):
        for mode in ("own group", "forks"):
            with self.subTest(mode):
                ended = run(mode)
                self.assertEqual(ended.returncode, 0, ended.stderr)
                self.assertEqual(sorted(ended.stdout.splitlines()), [f"rank {rank} of 2: the plain loop's losses" for rank in (0, 1)])

    def test_its_summary_names_the_cause(self):
        ended = run("failure", forks=False)  # whose ends come to torchrun in another order
        self.assertEqual(ended.returncode, 1, ended.stderr)
        summary = ended.stderr.partition("Root Cause (first observed failure)")[2]
        self.assertIn("rank      : 1 ", summary)
        self.assertIn('raise ValueError("on rank 1")', summary)
        self.assertIn("[rank 1] ValueError: on rank 1", ended.stderr.splitlines())


if __name__ == "__main__":
    unittest.main()
