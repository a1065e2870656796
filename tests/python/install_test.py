"""What a wheel holds is complete: installed into a folder, the package trains from there, and refuses another torch."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import torch

SOURCE = pathlib.Path(__file__).resolve().parents[2] / "python_bindings" / "smdistributed"
TRAIN = """
import torch
import smdistributed.modelparallel.torch as smp

smp.init({"microbatches": 2, "log_level": "off"})
model = smp.DistributedModel(torch.nn.Linear(4, 2))
optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))

@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss

losses = []
for _ in range(2):
    optimizer.zero_grad()
    losses.append(train_step(model, torch.ones(4, 4)).reduce_mean())
    optimizer.step()
assert losses[1] < losses[0], losses
print(smp.__file__)
"""


class Install(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.target = pathlib.Path(folder.name).resolve()
        command = [os.environ["CMAKE"], "--install", os.environ["BUILD"], "--component", "python", "--prefix", folder.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.package = self.target / "smdistributed" / "modelparallel"

    def python(self, script):
        environment = {**os.environ, "PYTHONPATH": str(self.target)}
        command = [sys.executable, "-c", script]
        return subprocess.run(command, cwd=self.target, env=environment, capture_output=True, text=True, check=False)

    def test_trains(self):
        run = self.python(TRAIN)
        self.assertEqual(run.stdout.strip(), str(self.package / "torch" / "__init__.py"), run.stderr)

    def test_holds_the_package_and_nothing_else(self):
        files = {str(file.relative_to(SOURCE.parent)) for file in SOURCE.rglob("*") if file.is_file() and file.suffix != ".pyc"}
        built = next(self.package.glob("_engine.*.so"))
        files |= {str(built.relative_to(self.target)), "smdistributed/modelparallel/_built_with.py", "bin/smp"}
        if os.environ["HAS_CUDA"] == "TRUE":  # loaded by who computes there
            files.add("smdistributed/modelparallel/libsmp_cuda.so")
        installed = {str(file.relative_to(self.target)) for file in self.target.rglob("*") if not file.is_dir()}
        self.assertEqual(installed, files)
        self.assertFalse([file for file in self.target.rglob("*") if file.is_symlink()])

    def test_refuses_another_torch(self):
        (self.package / "_built_with.py").write_text('TORCH = "1.13.1"\n')
        run = self.python("import smdistributed.modelparallel.torch")
        self.assertNotEqual(run.returncode, 0)
        error = run.stderr.splitlines()[-1]
        self.assertTrue(error.startswith("ImportError: smdistributed.modelparallel: expected torch 1.13, "), run.stderr)
        self.assertIn("pip install", error)

    def test_requires_the_torch_that_it_was_built_for_and_numpy(self):
        ask = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r})\n"
        ask += "import requirements; print(requirements.dynamic_metadata({}, {}))"
        minor = ".".join(torch.__version__.split(".")[:2])
        self.assertEqual(self.python(ask).stdout, f"{{'dependencies': ['numpy', 'torch=={minor}.*']}}\n")

    def test_is_the_version_that_scripts_compare_with(self):
        run = self.python("import smdistributed.modelparallel as package; print(package.__version__)")
        self.assertRegex(run.stdout, r"^1\.15\.\d+\n$", run.stderr)


if __name__ == "__main__":
    unittest.main()
