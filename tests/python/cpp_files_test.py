"""A run goes from C++ to Python and back by its files, and on with the bits of one that stayed in C++."""

import functools
import json
import os
import pathlib
import subprocess
import tempfile
import unittest

from forked import ForkedScripts

SCRIPT = pathlib.Path(__file__).with_name("cpp_files_script.py")
STEPS = 9
scripts = ForkedScripts()
unittest.addModuleCleanup(scripts.close)


def cpp(*arguments, ranks, **environment):
    """tests/mpi/resume.cpp"""
    launcher = [os.environ["MPIRUN"], "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
    command = [*launcher, os.environ["RESUME"], *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


python = functools.partial(scripts.run, SCRIPT)


def losses(program, folder, first, last, optimizer, processes=1, stages=1):
    """Those of steps `first` to `last` - 1, by number."""
    config = {"microbatches": 4 // (processes // stages), "pipeline_parallel_degree": stages, "seed": 5, "log_level": "warning"}
    run = program(folder, str(first), str(last), optimizer, ranks=processes, SMP_CONFIG=json.dumps(config))
    if run.returncode != 0:
        raise AssertionError(f"steps {first} to {last} ended with {run.returncode}: {run.stdout}{run.stderr}")
    lines = [line.split() for line in run.stdout.splitlines() if line.startswith("loss ")]
    return {int(step): float.fromhex(loss) for _, step, loss in lines}


class Turns(unittest.TestCase):
    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())

    def whole(self, optimizer):
        whole = losses(cpp, f"{self.folder}/whole", 0, STEPS, optimizer)
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
        self.check_bits("SGD", [(cpp, 4), (python, 7), (cpp, 9)])

    def test_of_rmsprop_that_begins_in_python(self):
        self.check_bits("RMSprop", [(python, 2), (cpp, 5), (python, 9)])

    def test_of_other_numbers_of_stages(self):
        self.check_bits("Adagrad", [(cpp, 3, 2, 2), (python, 4), (python, 6, 2, 2), (cpp, 9, 3, 3)])

    def test_of_replicas(self):
        turns = [(cpp, 4, 2, 1), (python, 7, 2, 1), (cpp, 9, 2, 1)]
        whole = losses(cpp, f"{self.folder}/whole", 0, STEPS, "SGD", 2, 1)
        self.assertEqual(self.taking_turns("SGD", turns), whole)

    def test_of_adam_keep_its_state(self):
        """torch.optim rounds its first moment in another way than LibTorch, so the bits are those of steps in C++ alone."""
        whole = self.whole("AdamW")
        self.assertEqual(self.taking_turns("AdamW", [(cpp, 4), (python, 4), (cpp, 9)]), whole)
        found = self.taking_turns("AdamW", [(cpp, 4), (python, 9)])
        for step, loss in whole.items():
            self.assertAlmostEqual(found[step], loss, delta=1e-5)


if __name__ == "__main__":
    unittest.main()
