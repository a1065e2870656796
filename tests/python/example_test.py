"""The examples in Python print the same lines on one and on two processes, and the language model those of its C++ twin."""

import importlib.util
import os
import pathlib
import re
import subprocess
import unittest

from forked import ForkedScripts

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
TEXT = EXAMPLES.parent / "LICENSE"
MPIRUN = os.environ.get("MPIRUN")  # none in a build without MPI
TRANSFORMER_LM = os.environ.get("TRANSFORMER_LM")  # the C++ program; none in a build without examples

LANGUAGE_MODEL = ["--data", str(TEXT), "--width", "16", "--hidden", "24", "--heads", "2", "--layers", "2", "--bptt", "4"]
LANGUAGE_MODEL += ["--epochs", "3", "--batch-size", "16", "--print-every", "10"]
TINY = ["--steps", "4", "--print-every", "2", "--batch-size", "8", "--layers", "2", "--width", "16", "--length", "16"]
TINY += ["--vocab", "300"]


HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
MODELS = ["transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2", "tokenizers"]
scripts = ForkedScripts("sklearn.datasets", *MODELS * HAS_TRANSFORMERS)
unittest.addModuleCleanup(scripts.close)


def lines_of(run):
    if run.returncode != 0:
        raise AssertionError(f"ended with {run.returncode}: {run.stdout}{run.stderr}")
    return run.stdout.splitlines(), run.stderr


def example(name, *flags, ranks=1, **environment):
    return lines_of(scripts.run(EXAMPLES / name / "train.py", *flags, ranks=ranks, **environment))


def program(*command, **environment):
    run = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    return lines_of(run)


class Example(unittest.TestCase):
    def check(self, name, flags, num_lines, **environment):
        """Lines of one process, which two print as well, as a pipeline."""
        alone, _ = example(name, *flags)
        self.assertEqual(len(alone), num_lines, alone)
        two, log = example(name, *flags, ranks=2, **environment)
        self.assertEqual(two, alone)
        self.assertIn("Partition assignments:", log)
        return alone

    def test_mnist_in_sagemakers_style(self):
        alone = self.check("mnist_sagemaker", ["--epochs", "1"], 2, SM_HP_MP_PARAMETERS='{"partitions": 2}')
        self.assertIn("of 360 images are read rightly", alone[1])
        if MPIRUN is not None:
            launcher = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-np", "2"]
            command = scripts.command(EXAMPLES / "mnist_sagemaker" / "train.py", "--epochs", "1", "--partition", "manual")
            by_hand, _ = program(*launcher, *command, SM_HP_MP_PARAMETERS='{"partitions": 2, "auto_partition": false}')
            self.assertEqual(by_hand, alone)

    def test_mnist_of_ddp_on_stages_and_on_replicas(self):
        alone = self.check("mnist_ddp", ["--epochs", "1"], 2, SMP_CONFIG='{"partitions": 2}')
        replicas, log = example("mnist_ddp", "--epochs", "1", ranks=2)
        self.assertEqual(replicas, alone)
        self.assertIn("pipeline_parallel_degree: 1\n", log)

    def test_language_model_as_in_cpp(self):
        python = self.check("transformer_lm", LANGUAGE_MODEL, 12)
        if TRANSFORMER_LM is not None:
            cpp, _ = program(TRANSFORMER_LM, *LANGUAGE_MODEL)
            ours, theirs = (re.findall(r"(?<=loss )[\d.]+", "\n".join(lines)) for lines in (python, cpp))
            self.assertEqual(len(ours), 12)
            for our, their in zip(ours, theirs, strict=True):
                self.assertAlmostEqual(float(our), float(their), delta=0.0015)  # printed with three decimals

    @unittest.skipUnless(HAS_TRANSFORMERS, "no transformers")
    def test_gpt2(self):
        self.assertRegex(self.check("gpt2", TINY, 3)[2], r"^test loss 5\.\d+, perplexity")

    @unittest.skipUnless(HAS_TRANSFORMERS, "no transformers")
    def test_bert(self):
        self.assertRegex(self.check("bert", TINY, 3)[2], r"masked words are found")


if __name__ == "__main__":
    unittest.main()
