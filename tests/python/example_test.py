"""The example in SageMaker's style prints the same lines on one and on two processes, placed automatically and by hand."""

import os
import pathlib
import subprocess
import sys
import unittest

EXAMPLE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "mnist_sagemaker" / "train.py"
MPIRUN = os.environ.get("MPIRUN")  # none in a build without MPI


def lines_of(launcher, parameters, *flags):
    environment = {**os.environ, "SM_HP_MP_PARAMETERS": parameters}
    command = [*launcher, sys.executable, str(EXAMPLE), "--epochs", "1", *flags]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(f"{command} ended with {run.returncode}: {run.stdout}{run.stderr}")
    return run.stdout.splitlines(), run.stderr


class Example(unittest.TestCase):
    def test_same_on_one_and_two_processes(self):
        alone, _ = lines_of([], '{"partitions": 1, "microbatches": 4}')
        self.assertEqual(len(alone), 2)
        self.assertIn("of 360 images are read rightly", alone[1])
        if MPIRUN is None:
            return
        launcher = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", "2"]
        automatic, log = lines_of(launcher, '{"partitions": 2, "microbatches": 4}')
        self.assertEqual(automatic, alone)
        self.assertIn("Partition assignments:", log)
        by_hand, _ = lines_of(launcher, '{"partitions": 2, "microbatches": 4, "auto_partition": false}', "--partition", "manual")
        self.assertEqual(by_hand, alone)


if __name__ == "__main__":
    unittest.main()
