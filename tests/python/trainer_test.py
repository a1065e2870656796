"""transformers' Trainer: a script that says nothing of smp trains, evaluates, saves and resumes on two stages as on one."""

import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

from forked import ForkedScripts
from safetensors.torch import load_file

SCRIPT = pathlib.Path(__file__).resolve().with_name("trainer_script.py")
PAGE = SCRIPT.parents[2] / "docs" / "from_trainer.md"
MODELS = ("language_model", "classifier")
STAGES = {
    "SM_HP_MP_PARAMETERS": '{"partitions": 2, "microbatches": 4, "ddp": true, "log_level": "off"}',
    "SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled": true}',
}


# All that imports nothing of smp: the Trainer does where it finds SageMaker's variables.
scripts = ForkedScripts("transformers.models.bert.modeling_bert", "transformers.models.gpt2.modeling_gpt2")
unittest.addModuleCleanup(scripts.close)


def start(test, *command, variables, folder):
    environment = {**os.environ, **variables}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    test.assertEqual(ended.returncode, 0, ended.stderr[-3000:])
    return ended.stdout


def start_stages(test, *arguments, folder):
    launcher = [os.environ["MPIRUN"], "--oversubscribe", "--bind-to", "none", "-np", "2"]
    script = scripts.command("-m", "smdistributed.modelparallel.cpu", *arguments)
    return start(test, *launcher, *script, variables=STAGES, folder=folder)


def noted(folder, checkpoint):
    """By the script, of each model, trained on from there."""
    return {name: json.loads((folder / f"{name}_{checkpoint}.json").read_text()) for name in MODELS}


class OfTransformers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.plain, cls.stages = pathlib.Path(folder.name, "plain"), pathlib.Path(folder.name, "stages")
        cls.plain.mkdir(), cls.stages.mkdir()
        start(cls(), *scripts.command(SCRIPT, cls.plain), variables={}, folder=cls.plain)
        start_stages(cls(), SCRIPT, cls.stages, folder=cls.stages)
        cls.expected, cls.fresh = noted(cls.plain, None), noted(cls.stages, None)

    def close(self, ours, theirs, what):
        self.assertEqual(len(ours), len(theirs), what)
        for a, b in zip(ours, theirs, strict=True):
            self.assertAlmostEqual(a, b, delta=1e-5, msg=what)

    def test_trains(self):
        for name in MODELS:
            self.close(self.fresh[name]["losses"], self.expected[name]["losses"], name)
            self.assertEqual(len(self.fresh[name]["losses"]), 6)
            self.assertEqual(self.fresh[name]["processes"], 1, "stages are no replicas to accelerate")

    def test_evaluates_an_uneven_last_batch(self):
        for name in MODELS:
            self.assertEqual(len(self.fresh[name]["evaluations"]), 2)
            for ours, theirs in zip(self.fresh[name]["evaluations"], self.expected[name]["evaluations"], strict=True):
                self.close(ours, theirs, name)
                self.assertEqual(ours[1], 22)

    def test_saves_what_a_plain_model_loads(self):
        for name in MODELS:
            ours, theirs = (load_file(folder / name / "last" / "model.safetensors") for folder in (self.stages, self.plain))
            self.assertEqual(sorted(ours), sorted(theirs))
            for key, value in ours.items():
                self.assertLess((value - theirs[key]).abs().max(), 1e-4, f"{name}: {key}")

    def test_resumes(self):
        resumed = noted(self.stages, "checkpoint-3")
        for name in MODELS:
            self.assertEqual(resumed[name]["losses"], self.fresh[name]["losses"][3:], name)
            self.assertEqual(resumed[name]["evaluations"][-1], self.fresh[name]["evaluations"][-1], name)

    def test_refuses_losses_that_transformers_would_leave_out(self):
        errors = json.loads((self.stages / "refused.json").read_text())
        self.assertEqual(len(errors), 3, errors)
        names = ("label_smoothing_factor", "compute_loss_func", "a compute_loss of its own")
        for error, name in zip(errors, names, strict=True):
            self.assertIn(f"got {name}. Compute the loss in the model's forward", error)

    def test_runs_the_script_of_the_page(self):
        (script,) = re.findall("```py\n(.*?)```", PAGE.read_text(), re.DOTALL)
        (self.stages / "train.py").write_text(script)
        self.assertIn("eval_loss", start_stages(self, "train.py", folder=self.stages))
        self.assertTrue((self.stages / "run" / "last" / "model.safetensors").exists())


if __name__ == "__main__":
    unittest.main()
