"""tests/gpu/run.sh where there is no GPU, and where a test fails: neither passes.

  gpu_run_test.py SOURCE_DIR
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

RUN = pathlib.Path(sys.argv.pop(1), "tests/gpu/run.sh")
PROGRAMS = ("gpu_loopback_test", "gpu_training_test", "gpu_oracle_test", "gpu_bodies_test", "gpu_layouts_test", "bench_gpu")
PROGRAMS += ("python",)  # asked where torch is


def run(**scripts):
    """With programs that are these scripts, and else succeed."""
    with tempfile.TemporaryDirectory() as build:
        pathlib.Path(build, "bin").mkdir()
        for name in PROGRAMS:
            program = pathlib.Path(build, "bin", name)
            program.write_text(f"#!/bin/sh\necho '{name} 1 unit'\n{scripts.get(name, 'true')}\n")
            program.chmod(0o700)
        return subprocess.run([RUN, build, f"{build}/bin/python"], capture_output=True, text=True)


class Run(unittest.TestCase):
    def test_says_what_was_not_run_without_a_gpu(self):
        result = run(gpu_loopback_test="exit 1")
        self.assertEqual((result.returncode, result.stdout), (1, ""))
        self.assertIn("test-gpu: nothing was run but the build: this machine shows no GPU.", result.stderr)

    def test_fails_where_one_does_and_runs_the_others(self):
        result = run(gpu_training_test="exit 3")
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr, "test-gpu: failed: gpu_training_test\n")
        for other in ("gpu_oracle_test", "bench_gpu"):
            self.assertIn(f"{other} 1 unit", result.stdout)
        self.assertEqual(run().returncode, 0)


if __name__ == "__main__":
    unittest.main()
