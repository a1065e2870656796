"""Batch files of deploy/ and srun under Slurms made for the test, of one node and of two. Needs root, iproute2, and Debian's packages
slurm-wlm and munge.

Usage: slurm_test.py OneNode|TwoNodes SMP RECOVERING DEPLOY
"""

import os
import pathlib
import select
import subprocess
import sys
import tempfile
import threading
import unittest

import two_hosts
import worlds
from slurm import LIMIT_S, Slurm, losses

NUM_STEPS = 1000


class SlurmTestCase(unittest.TestCase):
    hosts = None

    def setUp(self):
        self.folder = self.enterContext(tempfile.TemporaryDirectory())
        self.slurm = Slurm(self.folder, SMP, self.hosts)
        self.addCleanup(self.slurm.close)
        # A job that is there before its nodes may wait for the controller's next round, of a minute.
        self.slurm.wait_until_idle()
        self.output = pathlib.Path(self.folder, "output")

    def wait_for_a_loss(self):
        """Of a job that prints to the output."""
        command = ["tail", "-F", "-n", "+1", self.output]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0) as tail:
            self.addCleanup(tail.kill)
            line = b""
            while not line.startswith(b"loss "):
                if not select.select([tail.stdout], [], [], LIMIT_S)[0]:
                    self.fail(f"nothing printed for {LIMIT_S} s\n{self.slurm.state()}")
                line = tail.stdout.readline()
            tail.kill()

    def check_that_it_goes_on(self, file, *options):
        """A job that is asked to stop, and queued again, on nodes where the place of its first step's socket is taken."""
        program = RECOVERING, f"{self.folder}/run", str(NUM_STEPS)
        job = self.slurm("sbatch", "--parsable", *options, f"--output={self.output}", DEPLOY / file, *program).strip()
        self.wait_for_a_loss()
        self.slurm("scancel", "--signal=USR1", "--batch", job)
        self.slurm.wait_until(job, "JobState=PENDING Reason=BeginTime")
        self.assertLess(len(losses(self.output.read_text().splitlines())), NUM_STEPS)
        self.slurm.wait_until_idle()
        for node in self.slurm.on:
            left = pathlib.Path(self.folder, f"spool_{node}", f"stepd.slurm.pmix.{job}.0")
            left.unlink(missing_ok=True)
            left.mkdir()  # which a slurmstepd that is late does not remove
        # In place of two minutes later; in the second in which it has ended the first start Slurm lets no other begin.
        self.slurm("scontrol", "update", "job", job, "StartTime=now+2")
        self.slurm.wait_until(job, "JobState=COMPLETED")
        whole = self.slurm(SMP, "run", "-np", "2", RECOVERING, f"{self.folder}/whole", str(NUM_STEPS))
        printed = self.output.read_text()
        self.assertTrue(losses(printed.splitlines()) == losses(whole.splitlines()), f"{printed}{self.slurm.logs()}")


class OneNode(SlurmTestCase):
    def test_goes_on_where_it_was_asked_to_stop(self):
        self.check_that_it_goes_on("slurm.sbatch")

    def test_srun_starts_ranks_that_meet_over_pmix(self):
        step = self.slurm("srun", "--mpi=pmix", "-n", "2", RECOVERING, f"{self.folder}/step", "12")
        whole = self.slurm(SMP, "run", "-np", "2", RECOVERING, f"{self.folder}/whole", "12")
        self.assertEqual(len(losses(whole.splitlines())), 12)
        self.assertEqual(losses(step.splitlines()), losses(whole.splitlines()))

    def test_srun_without_pmix_is_refused_with_what_works(self):
        with self.assertRaises(subprocess.CalledProcessError) as caught:
            self.slurm("srun", "-n", "2", RECOVERING, f"{self.folder}/run", "1")
        self.assertIn("launch: expected a launcher that smp knows, got srun", caught.exception.stderr)


class TwoNodes(SlurmTestCase):
    """Each with a rank."""

    def setUp(self):
        self.hosts = self.enterContext(two_hosts.Hosts())
        super().setUp()

    def submit(self, file, *program):
        """A batch job, which has ended: its exit code."""
        return subprocess.run(
            [self.hosts.folder / "on_h1", "sbatch", "--wait", "--nodes=2", "--ntasks-per-node=1", f"--output={self.output}",
             DEPLOY / file, RECOVERING, *program], env=self.slurm.environment, stdout=subprocess.DEVNULL, check=False,
            timeout=2 * LIMIT_S).returncode

    def ranks(self, host):
        return [pid for pid in self.hosts.processes(host) if worlds.name_of(pid).startswith("recovering")]

    def test_both_ways_to_start_ranks_have_the_losses_of_one_host(self):
        whole = self.slurm(SMP, "run", "-np", "2", RECOVERING, f"{self.folder}/whole", "12")
        self.assertEqual(len(losses(whole.splitlines())), 12)
        for file in ("slurm_srun.sbatch", "slurm.sbatch"):
            code = self.submit(file, f"{self.folder}/{file}", "12")
            self.assertEqual(code, 0, self.output.read_text())
            self.assertEqual(losses(self.output.read_text().splitlines()), losses(whole.splitlines()), file)
            self.output.unlink()

    def test_goes_on_where_it_was_asked_to_stop(self):
        self.check_that_it_goes_on("slurm_srun.sbatch", "--nodes=2", "--ntasks-per-node=1")

    def test_a_rank_that_is_killed_on_one_node_ends_both(self):
        pace = f"{self.folder}/pace"
        os.mkfifo(pace)
        held = os.open(pace, os.O_RDWR)  # nobody writes, so that the job waits behind its first step
        self.addCleanup(os.close, held)
        job = threading.Thread(target=self.submit, args=("slurm_srun.sbatch", f"{self.folder}/run", "12", pace))
        job.start()
        self.wait_for_a_loss()
        [rank] = self.ranks("h2")
        os.kill(rank, 9)
        job.join()
        self.assertEqual([self.ranks(host) for host in ("h1", "h2")], [[], []], self.output.read_text())


if __name__ == "__main__":
    TESTS, *paths = sys.argv[1:]
    SMP, RECOVERING, DEPLOY = map(pathlib.Path, paths)
    unittest.main(argv=["test", TESTS], verbosity=2)
