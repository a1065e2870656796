"""python -m smdistributed.modelparallel.cpu: a CUDA script without GPUs, on one process and on two."""

import os
import subprocess
import sys
import unittest

from forked import ForkedScripts

FOLDER = os.path.dirname(os.path.abspath(__file__))
SCRIPT = os.path.join(FOLDER, "cuda_script.py")


MODULE = ("-m", "smdistributed.modelparallel.cpu")
scripts = ForkedScripts()
unittest.addModuleCleanup(scripts.close)


def run(*launcher, arguments=(SCRIPT, "--epochs", "2")):
    command = [*launcher, *scripts.command(*MODULE, *arguments)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


class CudaScripts(unittest.TestCase):
    def test_train_on_cpus(self):
        alone = run()
        self.assertEqual(alone.returncode, 0, alone.stderr)
        self.assertRegex(alone.stdout, r"losses \[\d")
        if "MPIRUN" in os.environ:
            launcher = (os.environ["MPIRUN"], "-np", "2", "--oversubscribe", "--bind-to", "none")
            both = run(*launcher)
            self.assertEqual(both.returncode, 0, both.stderr)
            self.assertEqual(both.stdout, alone.stdout)

    def test_that_train_by_themselves(self):
        calls = run(arguments=(os.path.join(FOLDER, "cuda_calls.py"),))
        self.assertEqual((calls.returncode, calls.stdout), (0, "all called\n"), calls.stderr)

    def test_want_a_script(self):
        """Of the interpreter itself."""
        nothing = subprocess.run([sys.executable, *MODULE], capture_output=True, text=True, check=False)
        self.assertEqual(nothing.returncode, 1)
        self.assertIn("expected a script", nothing.stderr)


if __name__ == "__main__":
    unittest.main()
