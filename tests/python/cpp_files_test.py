"""A run goes from C++ to Python and back by its files, and on with the bits of one that stayed in C++."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

MPIRUN = os.environ["MPIRUN"]
CPP = [os.environ["RESUME"]]  # tests/mpi/resume.cpp
PYTHON = [sys.executable, str(pathlib.Path(__file__).with_name("cpp_files_script.py"))]
STEPS = 9


def losses(program, folder, first, last, optimizer, processes=1, stages=1):
    """Those of steps `first` to `last` - 1, by number."""
    config = {"microbatches": 4 // (processes // stages), "pipeline_parallel_degree": stages, "seed": 5, "log_level": "warning"}
    launcher = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", str(processes)] if processes > 1 else []
    command = [*launcher, *program, folder, str(first), str(last), optimizer]
    environment = {**os.environ, "SMP_CONFIG": json.dumps(config)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise AssertionError(f"{command} ended with {run.returncode}: {run.stdout}{run.stderr}")
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("loss ")]
    return {int(step): float.fromhex(loss) for _, step, loss in lines}


class Turns(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def whole(self, optimizer):
        whole = losses(CPP, f"{self.folder}/whole", 0, STEPS, optimizer)
        self.assertEqual(list(whole), list(range(STEPS)))
        return whole

    def taking_turns(self, optimizer, turns):
        """`turns`: (program, last step, processes, stages)."""
        found, first = {}, 0
        for program, last, *ranks in turns:
            found.update(losses(program, f"{self.folder}/turns", first, last, optimizer, *ranks))
            first = last
        return found

    def check_bits(self, optimizer, turns):
        self.assertEqual(self.taking_turns(optimizer, turns), self.whole(optimizer))

    def test_of_sgd(self):
        self.check_bits("SGD", [(CPP, 4), (PYTHON, 7), (CPP, 9)])

    def test_of_rmsprop_that_begins_in_python(self):
        self.check_bits("RMSprop", [(PYTHON, 2), (CPP, 5), (PYTHON, 9)])

    def test_of_other_numbers_of_stages(self):
        self.check_bits("Adagrad", [(CPP, 3, 2, 2), (PYTHON, 4), (PYTHON, 6, 2, 2), (CPP, 9, 3, 3)])

    def test_of_replicas(self):
        turns = [(CPP, 4, 2, 1), (PYTHON, 7, 2, 1), (CPP, 9, 2, 1)]
        whole = losses(CPP, f"{self.folder}/whole", 0, STEPS, "SGD", 2, 1)
        self.assertEqual(self.taking_turns("SGD", turns), whole)

    def test_of_adam_keep_its_state(self):
        """torch.optim rounds its first moment in another way than LibTorch, so the bits are those of steps in C++ alone."""
        whole = self.whole("AdamW")
        self.assertEqual(self.taking_turns("AdamW", [(CPP, 4), (PYTHON, 4), (CPP, 9)]), whole)
        found = self.taking_turns("AdamW", [(CPP, 4), (PYTHON, 9)])
        for step, loss in whole.items():
            self.assertAlmostEqual(found[step], loss, delta=1e-5)


if __name__ == "__main__":
    unittest.main()
