"""smp.doctor: what it finds of the job, what it prints, and what it warns of."""

import contextlib
import io
import os
import subprocess
import sys
import unittest

import support
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.doctor import Report


def setUpModule():
    smp.init({"microbatches": 2, "log_level": "off"})


def called():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        report = smp.doctor()
    return report, printed.getvalue()


class Doctor(unittest.TestCase):
    def test_finds_the_same_on_all_ranks_and_prints_on_the_first(self):
        report, printed = called()
        self.assertEqual([rank["rank"] for rank in report.ranks], list(range(smp.size())))
        self.assertEqual(report.ranks[0]["versions"]["torch"], torch.__version__)
        self.assertEqual(printed, f"{report}\n" if smp.rank() == 0 else "")
        self.assertEqual(len(set(smp.allgather(str(report), smp.WORLD))), 1)
        for words in ("torch: ", "Python: ", f"{len(os.sched_getaffinity(0))} cores, 1 threads", "microbatches: 2 (default 1)"):
            self.assertIn(words, str(report))
        self.assertEqual(report.config["log_level"], ("off", "info"))
        self.assertNotIn("seed", report.config)
        uses_mpi = "OMPI_COMM_WORLD_SIZE" in os.environ
        messages = "none" if smp.size() == 1 else "MPI" if uses_mpi else "sockets"
        self.assertIn(f"messages: {messages}", str(report))
        self.assertEqual("messages go through sockets" in str(report), messages == "sockets")
        if uses_mpi:
            self.assertIn("MPI: Open MPI", str(report))

    def test_measures_neighbours(self):
        report, _ = called()
        self.assertEqual([link["ranks"] for link in report.links], [(rank, rank + 1) for rank in range(smp.size() - 1)])
        for link in report.links:
            self.assertGreater(link["latency_us"], 0)
            self.assertGreater(link["bytes_per_s"], 0)
            self.assertIn("between ranks {} and {}".format(*link["ranks"]), str(report))

    def test_works_beside_a_model(self):
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1)))

        @smp.step
        def train_step(model, x):
            loss = model(x).sum()
            model.backward(loss)
            return loss

        losses = train_step(model, torch.ones(4, 4))
        called()
        support.same_bits(self, losses.outputs, train_step(model, torch.ones(4, 4)).outputs, "losses")

        @smp.step
        def asks(model, x):
            smp.doctor()

        with self.assertRaisesRegex(ValueError, "smp.doctor: expected a call outside of step bodies"):
            asks(model, torch.ones(4, 4))


def a_rank(number, host="here", versions=None, **changed):
    own = {"torch": "2.11.0+cpu", "torch it was built with": "2.11.0", **(versions or {})}
    rank = {"rank": number, "host": host, "cores": [0, 1, 2, 3], "threads": 1, "messages": "MPI", "OMP_NUM_THREADS": "1"}
    return {**rank, "OMPI_MCA_btl": None, "versions": own, **changed}


class Warnings(unittest.TestCase):
    def test_of_what_is_likely_to_be_wrong(self):
        two = [a_rank(0), a_rank(1)]
        for ranks, words in (
            ([a_rank(0, versions={"torch": "2.11.1"})], "built with torch 2.11.0 and runs with 2.11.1"),
            ([a_rank(0), a_rank(1, versions={"torch": "2.11.1"})], "rank 1 on here has torch 2.11.1"),
            ([a_rank(0, threads=3), a_rank(1, threads=3)], "2 ranks on here run 6 threads on 4 cores"),
            ([a_rank(0), a_rank(1, OMP_NUM_THREADS=None)], "OMP_NUM_THREADS is not set"),
            ([a_rank(0, OMPI_MCA_btl="self,tcp"), a_rank(1)], "talk by TCP"),
            ([a_rank(0, messages="sockets"), a_rank(1, "there")], "messages go through sockets"),
            ([a_rank(0), a_rank(1, "there")], "between the 2 hosts go by TCP"),
        ):
            report = Report(ranks, {}, [])
            self.assertEqual(len(report.warnings), 1, report.warnings)
            self.assertIn(words, report.warnings[0])
            self.assertIn(f"warning: {report.warnings[0]}", str(report))
        bound = [a_rank(0, cores=[0], threads=1), a_rank(1, cores=[1], threads=1)]  # as mpirun binds them
        self.assertIn("2 cores, 1 threads", str(Report(bound, {}, [])))
        for ranks in (two, bound, [a_rank(0, OMP_NUM_THREADS=None)], [{**each, "OMPI_MCA_btl": "^openib"} for each in two]):
            self.assertEqual(Report(ranks, {}, []).warnings, [])
            self.assertIn("no warnings", str(Report(ranks, {}, [])))


class Program(unittest.TestCase):
    def test_prints_the_report(self):
        if smp.size() > 1:
            self.skipTest("starts a job of its own")
        command = [sys.executable, "-m", "smdistributed.modelparallel.doctor"]
        launcher = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
        alone = {name: value for name, value in os.environ.items() if name not in launcher}
        program = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
        self.assertEqual(program.returncode, 0, program.stderr)
        self.assertIn(f"torch: {torch.__version__}", program.stdout)


if __name__ == "__main__":
    support.main()
