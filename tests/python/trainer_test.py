"""transformers' Trainer: a script that says nothing of smp trains, evaluates, saves and resumes on two stages as on one process."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

from safetensors.torch import load_file

SCRIPT = pathlib.Path(__file__).with_name("trainer_script.py")
MODELS = ("language_model", "classifier")
STAGES = {
    "SM_HP_MP_PARAMETERS": '{"partitions": 2, "microbatches": 4, "ddp": true, "log_level": "off"}',
    "SM_FRAMEWORK_PARAMS": '{"sagemaker_mpi_enabled": true}',
}


def run(test, processes, folder, how):
    """What the script has noted of each model."""
    environment, command = dict(os.environ), [sys.executable, str(SCRIPT), str(folder), how]
    if processes > 1:
        environment |= STAGES
        on_cpu = ["-m", "smdistributed.modelparallel.cpu"]
        command = [os.environ["MPIRUN"], "--oversubscribe", "--bind-to", "none", "-np", str(processes), *command]
        command[command.index(str(SCRIPT)) : command.index(str(SCRIPT))] = on_cpu
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    test.assertEqual(ended.returncode, 0, ended.stderr[-3000:])
    return {name: json.loads((folder / f"{name}_{how}.json").read_text()) for name in MODELS}


class OfTransformers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.plain, cls.stages = pathlib.Path(folder.name, "plain"), pathlib.Path(folder.name, "stages")
        cls.plain.mkdir(), cls.stages.mkdir()
        cls.expected = run(cls(), 1, cls.plain, "fresh")
        cls.fresh = run(cls(), 2, cls.stages, "fresh")

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
        resumed = run(self, 2, self.stages, "resume")
        for name in MODELS:
            self.assertEqual(resumed[name]["losses"], self.fresh[name]["losses"][3:], name)
            self.assertEqual(resumed[name]["evaluations"][-1], self.fresh[name]["evaluations"][-1], name)


if __name__ == "__main__":
    unittest.main()
