"""What deploy/ holds, as far as it can be tried without a cluster: files for Kubernetes have the keys of their interfaces, scripts are
correct ones, and what they call takes the flags that they give.

Usage: manifests_test.py DEPLOY SMP
"""

import copy
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import jsonschema
import yaml
from schemas import SCHEMAS


def documents():
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def containers(node):
    """All of a document, wherever they are."""
    if isinstance(node, dict):
        yield from node.get("containers", ())
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from containers(each)


def calls_of_smp():
    """What is started as ranks: of containers, and of trainers in their place."""
    for name, document in documents():
        for each in (*containers(document), document["spec"].get("trainer", {})):
            if each.get("command") == ["smp"]:
                yield name, each["args"]


class Kubernetes(unittest.TestCase):
    def test_files_have_the_keys_of_their_interfaces(self):
        kinds = []
        for name, document in documents():
            with self.subTest(name):
                kinds.append(document["kind"])
                jsonschema.validate(document, SCHEMAS[document["kind"]])
        self.assertEqual(set(kinds), set(SCHEMAS))

    def test_a_misspelt_key_is_found(self):
        for name, document in documents():
            damaged = copy.deepcopy(document)
            damaged["spec"]["slotsPerWorkers"] = 4
            with self.subTest(name), self.assertRaises(jsonschema.ValidationError):
                jsonschema.validate(damaged, SCHEMAS[document["kind"]])

    def test_ranks_have_shared_memory_and_the_user_whose_keys_they_have(self):
        num_hosts = 0
        for name, document in documents():
            for each in containers(document):
                if "/usr/sbin/sshd" not in " ".join([*each.get("command", []), *each.get("args", [])]):
                    continue
                num_hosts += 1
                with self.subTest(name):
                    self.assertIn({"name": "shm", "mountPath": "/dev/shm"}, each["volumeMounts"])
                    user = 0 if document["kind"] == "Job" else 1000  # Volcano's keys are root's
                    self.assertEqual(each["securityContext"]["runAsUser"], user)
        self.assertEqual(num_hosts, 3)

    def test_smp_takes_the_flags(self):
        calls = [*calls_of_smp()]
        self.assertEqual(len(calls), 2)
        with tempfile.TemporaryDirectory() as folder:
            hosts = pathlib.Path(folder, "hosts")
            hosts.write_text("worker-0 slots=4\nworker-1 slots=4\n")
            for name, arguments in calls:
                own = [str(hosts) if each == "/etc/mpi/hostfile" else each for each in arguments]
                with self.subTest(name):
                    subprocess.run([SMP, own[0], "--dry-run", *own[1:]], check=True, capture_output=True)


class Scripts(unittest.TestCase):
    def test_are_correct(self):
        scripts = [*DEPLOY.glob("*.sh"), *DEPLOY.glob("*.sbatch")]
        self.assertEqual(len(scripts), 4)
        for script in scripts:
            with self.subTest(script.name):
                subprocess.run(["bash", "-n", script], check=True)
                if shutil.which("shellcheck"):
                    subprocess.run(["shellcheck", script], check=True)

    def test_hosts_are_counted(self):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "hosts").write_text("# ours\na slots=3\nb slots=2\n\nc\na\n")
            called = pathlib.Path(folder, "smp")
            called.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
            called.chmod(0o755)
            printed = subprocess.run([DEPLOY / "hosts.sh", f"{folder}/hosts", "./train", "--flag"], check=True, text=True,
                                     capture_output=True, env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"})
        self.assertEqual(printed.stdout.split(), ["run", "-np", "7", "--hosts", "a:4,b:2,c:1", "--max-restarts", "5",
                                                  "--min-np", "1", "./train", "--flag"])

    def test_the_run_of_skypilot_is_one(self):
        job = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
        self.assertLessEqual(set(job), {"name", "num_nodes", "resources", "run"})
        subprocess.run(["bash", "-n"], input=job["run"], text=True, check=True)

    def test_the_hosts_of_volcano_have_four_ranks_each(self):
        [text] = [each["args"][0] for name, document in documents() if name == "volcano.yaml"
                  for each in containers(document) if each["name"] == "master"]
        text = text.replace("exec smp", "echo")
        printed = subprocess.run(["bash", "-c", text], text=True, check=True, capture_output=True,
                                 env={**os.environ, "MPI_HOST": "worker-0.smp-train,worker-1.smp-train"})
        self.assertEqual(printed.stdout.split(), ["run", "-np", "8", "--hosts", "worker-0.smp-train:4,worker-1.smp-train:4",
                                                  "/opt/train"])

    def test_the_job_of_sagemaker_is_of_an_estimator_that_takes_a_distribution(self):
        """Of a package in place of SageMaker's, which says how it was called."""
        with tempfile.TemporaryDirectory() as folder:
            package = pathlib.Path(folder, "sagemaker", "pytorch")
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("class PyTorch:\n"
                                                 "    def __init__(self, entry_point, distribution, **_): print(sorted(distribution))\n"
                                                 "    def fit(self): print('fit')\n")
            printed = subprocess.run([sys.executable, DEPLOY / "sagemaker_job.py", "image", "role"], check=True, text=True,
                                     capture_output=True, env={**os.environ, "PYTHONPATH": folder})
        self.assertEqual(printed.stdout.splitlines(), ["['mpi', 'smdistributed']", "fit"])

    def test_the_distribution_of_sagemaker_is_read(self):
        """By smp itself, from where the job gets it."""
        printed = subprocess.run([sys.executable, DEPLOY / "sagemaker_job.py", "image", "role", "--dry-run"], check=True, text=True,
                                 capture_output=True)
        distribution = json.loads(printed.stdout)["distribution"]
        parameters = distribution["smdistributed"]["modelparallel"]["parameters"]
        # One process has no partitions, and the rest is as it stands there.
        environment = {**os.environ, "SM_HP_MP_PARAMETERS": json.dumps({**parameters, "partitions": 1})}
        script = ("import smdistributed.modelparallel.torch as smp; from smdistributed.modelparallel import _engine; smp.init(); "
                  "print(_engine.config())")
        config = subprocess.run([sys.executable, "-c", script], env=environment, check=True, text=True, capture_output=True).stdout
        self.assertEqual(json.loads(config)["microbatches"], parameters["microbatches"])


if __name__ == "__main__":
    DEPLOY, SMP = map(pathlib.Path, sys.argv[1:])
    unittest.main(argv=["test"], verbosity=2)
