"""Jobs of two and three hosts: that they run and have the bits of one, what they listen on, and what becomes of them when the
network between the hosts is gone. Tests run side by side, since most wait for a host to be missed.

Usage: two_hosts_test.py TwoHosts|OverSsh SMP FAILING_WORLD RESUME RECOVERING
"""

import json
import os
import re
import shutil
import sys
import tempfile
import time
import unittest

import two_hosts
import worlds

LIMIT_S = 120 * worlds.SLOWNESS
STORE_PORT = 29500


class HostsTestCase(unittest.TestCase):
    def setUp(self):
        self.hosts = self.enterContext(two_hosts.Hosts())

    def processes(self, host):
        """Without those of ssh's daemon."""
        return [pid for pid in self.hosts.processes(host) if worlds.name_of(pid) != "sshd"]

    def start(self, *program, config=None, num_ranks=2, options=()):
        hosts = ",".join(f"{name}:{num_ranks // len(self.hosts.addresses)}" for name in self.hosts.addresses)
        environment = {**worlds.ENVIRONMENT, "SMP_CONFIG": json.dumps(config or {})}
        return self.hosts.start("h1", [SMP, "run", "--hosts", hosts, "--interface", "eth0", "-np", num_ranks,
                                       *options, *program], environment)

    def start_ready(self, mode, token):
        num_ranks = len(self.hosts.addresses)
        job = self.start(FAILING_WORLD, mode, token, num_ranks=num_ranks)
        self.printed = []
        while sum("ready" in line for line in self.printed) < num_ranks:
            self.printed.append(job.stdout.readline())
            self.assertTrue(self.printed[-1], "".join(self.printed))
        return job

    def finish(self, job):
        """What a job has printed, of which no process is left. A host that is cut off notices by itself."""
        output, _ = job.communicate(timeout=LIMIT_S)
        for host in self.hosts.addresses:
            for pid in self.processes(host) if host != "h1" else ():
                worlds.wait_for_end(pid)
        self.assertEqual([pid for host in self.hosts.addresses for pid in self.processes(host)], [], output)
        return output

    def check_a_killed_rank(self):
        job = self.start_ready("interrupted", "token")
        [rank] = [pid for pid in self.processes("h2") if worlds.name_of(pid).startswith("failing")]
        os.kill(rank, 9)
        output = self.finish(job)
        self.assertEqual(job.returncode, 137, output)


class TwoHosts(HostsTestCase):
    def check_bits(self, *numbers_of_ranks):
        config = {"microbatches": 4, "seed": 5, "log_level": "warning"}
        with tempfile.TemporaryDirectory() as folder:
            losses = []
            for ranks in numbers_of_ranks:
                output = self.finish(self.start(RESUME, f"{folder}/{ranks}", "0", "4", config=config, num_ranks=ranks))
                losses.append(re.findall("loss .*", output))
                self.assertEqual(len(losses[-1]), 4, output)
            self.assertEqual(losses[0], losses[-1])
            alone = self.hosts.start("h1", [RESUME, f"{folder}/alone", "0", "4"],
                                     {**os.environ, "SMP_CONFIG": json.dumps(config)})
            self.assertEqual(re.findall("loss .*", self.finish(alone)), losses[0])

    def test_have_the_bits_of_one(self):
        self.check_bits(2, 4)

    @worlds.long
    def test_three_have_the_bits_of_one(self):
        self.hosts = self.enterContext(two_hosts.Hosts(3))
        self.check_bits(3)

    @worlds.long
    def test_a_cut_between_them_ends_both_and_names_the_host(self):
        self.check_cut()

    def test_a_cut_between_one_of_three_and_the_others_ends_all(self):
        self.hosts = self.enterContext(two_hosts.Hosts(3))
        self.check_cut()

    def check_cut(self):
        job = self.start_ready("interrupted", "token")
        self.assertGreater(len(self.hosts.processes("h2")), 0)
        self.hosts.wait_until_quiet("h2")  # else TCP tries for a quarter of an hour, as docs/reliability.md says
        self.hosts.cut()
        begin = time.monotonic()
        output = self.finish(job)
        print(f"all hosts had ended {time.monotonic() - begin:.1f} s after the cut", file=sys.stderr)
        self.assertNotEqual(job.returncode, 0)
        self.assertRegex(output, r"lost communication with a remote daemon[\s\S]*on node h2")

    def test_a_job_goes_on_with_the_host_that_is_left(self):
        """With the losses of one that nothing happens to. It waits behind each step until this script lets it go on."""
        config = {"microbatches": 2, "seed": 5, "log_level": "warning"}
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/pace")
            pace = os.open(f"{folder}/pace", os.O_RDWR)
            self.addCleanup(os.close, pace)
            losses = {}
            for case in ("whole", "cut"):
                job = self.start(RECOVERING, f"{folder}/{case}", "14", f"{folder}/pace", config=config, num_ranks=4,
                                 options=("--max-restarts", 1, "--min-np", 2))
                printed = []
                while line := job.stdout.readline():
                    printed.append(line)
                    if not line.startswith("loss"):
                        continue
                    _, step, loss = line.split()
                    self.assertEqual(losses.setdefault(step, loss), loss, "".join(printed))
                    if case == "cut" and step == "11" and sum(each.startswith("loss 11 ") for each in printed) == 1:
                        self.hosts.wait_until_quiet("h2")
                        self.hosts.cut()
                    else:
                        os.write(pace, b"\n")
                output = self.finish(job)
                self.assertEqual(job.returncode, 0, "".join(printed) + output)
            self.assertIn("smp run: it goes on with 2 processes, on h1:2\n", printed)
            self.assertEqual([line.split()[1] for line in printed if line.startswith("loss")],
                             [str(step) for step in (*range(12), *range(10, 14))])

    def losses_of(self, folder, pace, kill_at=None):
        """By step, of a job of two replicas, whose rank on h2 may be killed behind a step."""
        config = {"pipeline_parallel_degree": 2, "microbatches": 2, "seed": 5, "log_level": "warning"}
        job = self.start(RECOVERING, folder, "14", pace, config=config, num_ranks=4)
        printed, losses = [], {}
        while line := job.stdout.readline():
            printed.append(line)
            if not line.startswith("loss"):
                continue
            _, step, losses[int(line.split()[1])] = line.split()
            if step == kill_at:
                os.kill(next(pid for pid in self.hosts.processes("h2") if worlds.name_of(pid).startswith("recovering")), 9)
            else:
                self.write_to(pace)
        output = "".join(printed) + self.finish(job)
        self.assertEqual(job.returncode, 137 if kill_at else 0, output)
        return losses

    def write_to(self, pace):
        with open(pace, "wb", buffering=0) as file:
            file.write(b"\n")

    def test_what_the_host_of_one_replica_has_is_enough(self):
        """Hosts have folders of their own; that of h1, which reads, is lost."""
        with tempfile.TemporaryDirectory() as folder:
            os.mkfifo(f"{folder}/pace")
            pace = os.open(f"{folder}/pace", os.O_RDWR)  # there is always a reader
            self.addCleanup(os.close, pace)
            whole = self.losses_of(f"{folder}/whole@", f"{folder}/pace")
            self.losses_of(f"{folder}/killed@", f"{folder}/pace", kill_at="11")
            shutil.rmtree(f"{folder}/killed@h1")
            resumed = self.losses_of(f"{folder}/killed@", f"{folder}/pace")
            self.assertIn(min(resumed), (10, 11))  # the last save may have been under way
            self.assertEqual(resumed, {step: whole[step] for step in range(min(resumed), 14)})

    def start_of_torchrun(self, rank, on_second=1):
        """The first rank, which keeps the store, on h1; one of the others on h2."""
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        if rank > 0:
            local = {"LOCAL_RANK": str(rank - 1), "LOCAL_WORLD_SIZE": str(on_second)}
        environment = {**os.environ, **local, "RANK": str(rank), "WORLD_SIZE": str(1 + on_second),
                       "MASTER_PORT": str(STORE_PORT), "MASTER_ADDR": self.hosts.addresses["h1"]}
        return self.hosts.start("h1" if rank == 0 else "h2", [FAILING_WORLD, "interrupted", "token"], environment)

    def wait_until_ready(self, *ranks):
        for rank in ranks:
            while "ready" not in (line := rank.stdout.readline()):
                self.assertTrue(line, "ended before it was ready")

    def test_ranks_of_torchrun_listen_on_the_address_of_their_host_alone(self):
        """And only until they have met: here until the third has come. torch's own store listens everywhere."""
        ranks = []
        for rank, (host, address) in enumerate(self.hosts.addresses.items()):
            ranks.append(self.start_of_torchrun(rank, on_second=2))
            while not (listening := self.hosts.listening(host, but=STORE_PORT)):
                self.assertIsNone(ranks[-1].poll())
            self.assertEqual(listening, {address})
        ranks.append(self.start_of_torchrun(2, on_second=2))
        self.wait_until_ready(*ranks)
        for host in self.hosts.addresses:
            self.assertEqual(self.hosts.listening(host, but=STORE_PORT), set())
        self.hosts.kill_all()
        for rank in ranks:
            rank.communicate(timeout=LIMIT_S)

    def test_a_cut_between_ranks_of_torchrun_ends_both(self):
        ranks = [self.start_of_torchrun(rank) for rank in (0, 1)]
        self.wait_until_ready(*ranks)
        self.hosts.cut()
        for rank, other in zip(ranks, ("rank 1 \\(.*h2\\)", "rank 0 \\(.*h1\\)")):
            output, _ = rank.communicate(timeout=LIMIT_S)
            self.assertRegex(output, f"{other} was killed, ended without a word, or its host cannot be reached")
            self.assertEqual(rank.returncode, 3, output)

    def test_a_rank_that_hangs_on_the_other_says_where(self):
        """To the rank beside it, which hands it on."""
        job = self.start(FAILING_WORLD, "last_loops", "token", num_ranks=4)
        output = self.finish(job)
        self.assertEqual(job.returncode, 4, output)
        self.assertRegex(output, r"\[rank 0\] rank 3 \(.*on host h2\): no answer; it is on another host")
        self.assertRegex(output, r"\[rank 0\] rank 3 #0 failing_world\+0x")

    def test_a_rank_that_is_killed_ends_both(self):
        self.check_a_killed_rank()


class OverSsh(HostsTestCase):
    """By Debian's openssh-server on both."""

    def setUp(self):
        super().setUp()
        self.hosts.serve_ssh()

    def test_jobs_have_the_bits_of_one_host_and_a_configuration_arrives_as_it_is(self):
        with tempfile.TemporaryDirectory() as folder:
            timeline = f"{folder}/a;$(touch b) `c`, 'd' \"e\" \\ \n f"
            config = {"microbatches": 4, "seed": 5, "log_level": "warning"}
            over_ssh = self.finish(self.start(RESUME, f"{folder}/2", "0", "4", config={**config, "timeline": timeline}))
            alone = self.hosts.start("h1", [RESUME, f"{folder}/alone", "0", "4"],
                                     {**os.environ, "SMP_CONFIG": json.dumps(config)})
            losses = re.findall("loss .*", self.finish(alone))
            self.assertEqual(len(losses), 4)
            self.assertEqual(re.findall("loss .*", over_ssh), losses, over_ssh)
            self.assertTrue(os.path.exists(timeline), os.listdir(folder))

    def test_hosts_are_looked_over_and_train(self):
        for command in ("doctor", "selftest"):
            options = [SMP, command, "--hosts", "h1:1,h2:1", "--interface", "eth0", "-np", 2]
            job = self.hosts.start("h1", options, {**worlds.ENVIRONMENT, "SMP_CONFIG": '{"microbatches": 2}'})
            output = self.finish(job)
            self.assertEqual(job.returncode, 0, output)

    def test_a_rank_that_is_killed_ends_both(self):
        self.check_a_killed_rank()


if __name__ == "__main__":
    TESTS, SMP, FAILING_WORLD, RESUME, RECOVERING = sys.argv[1:]
    worlds.run_side_by_side(TESTS)
