"""Starts worlds of real processes that fail, and checks how they end.

Usage: failure_test.py FAILING_WORLD MPIRUN [mpirun flag ...]. Every world must end by itself,
name the culprit as its last word, and leave no process. The long form tries ten times what depends on who is first.
"""

import re
import signal
import sys

import worlds


class Failure(worlds.WorldTestCase):
    def start_mode(self, mode):
        return self.start(3, mode)

    def finish_ranks(self, job):
        return worlds.rank_lines(self.finish(job))

    def run_failing(self, mode):
        job = self.start_mode(mode)
        lines = self.finish_ranks(job)
        self.code = job.returncode
        self.assertNotEqual(self.code, 0, self.output)
        return lines

    def test_world_that_finishes_says_nothing(self):
        job = self.start_mode("finish")
        lines = self.finish_ranks(job)
        self.assertEqual(job.returncode, 0, self.output)
        self.assertEqual(worlds.reports(lines), [])

    def test_throw_is_the_last_line_and_the_only_report(self):
        for _ in range(20 if worlds.IS_LONG else 2):
            lines = self.run_failing("throw_in_exchange")
            self.assertEqual(self.code, 1, self.output)
            self.assertEqual(lines[-1], "[rank 1] out of luck", self.output)
            self.assertEqual(len(worlds.reports(lines)), 1, self.output)
            self.assertIn("say: rank 0 round 9", lines)

    def test_throw_comes_last_though_others_hear_of_it_late(self):
        lines = self.run_failing("throw_while_others_are_busy")
        self.assertEqual(sorted(lines[:-1]), ["say: rank 0 was busy", "say: rank 2 was busy"], self.output)
        self.assertEqual(lines[-1], "[rank 1] out of luck", self.output)

    def test_throw_reaches_ranks_that_compute(self):
        lines = self.run_failing("throw_while_others_compute")
        self.assertEqual(worlds.reports(lines), ["[rank 1] expected luck, got none. Bring some."], self.output)

    def test_throw_on_another_thread_is_reported_alike(self):
        lines = self.run_failing("throw_on_another_thread")
        self.assertEqual(worlds.reports(lines), ["[rank 1] the loader found no file"], self.output)

    def test_throw_everywhere_is_reported_by_each(self):
        reports = worlds.reports(self.run_failing("throw_everywhere"))
        self.assertGreaterEqual(len(reports), 1, self.output)
        for line in reports:
            self.assertRegex(line, r"^\[rank \d\] a setting is wrong$")

    def test_killed_rank_is_named_by_every_survivor(self):
        for mode in ("killed_while_others_wait", "killed_while_others_compute", "killed_in_a_collective"):
            with self.subTest(mode):
                reports = worlds.reports(self.run_failing(mode))
                self.assertEqual(sorted(line[:8] for line in reports), ["[rank 0]", "[rank 1]"], self.output)
                for line in reports:
                    self.assertRegex(line, r"\] rank 2 \(pid \d+ on host .+\) was killed", self.output)

    def test_rank_that_leaves_early_is_named(self):
        reports = worlds.reports(self.run_failing("left_early"))
        self.assertEqual(len(reports), 2, self.output)
        for line in reports:
            self.assertRegex(line, r"\] rank 2 \(pid \d+ on host .+\) was killed or ended", self.output)

    def check_hang(self, mode, rank, cause, lines):
        """One block of one rank: what each was doing, and the cause as its last line."""
        self.maxDiff = None
        reports = worlds.reports(self.run_failing(mode))
        self.assertEqual(self.code, 4, self.output)
        self.stack = [line for line in reports if re.match(rf"\[rank {rank}\] rank 1 #\d+ ", line)]
        reports = [line for line in reports if line not in self.stack]
        self.assertEqual(len(reports), 4, self.output)
        wait = r"receive of at most 4 bytes with tag 5, peer rank \d, action 2F0, after \d+\.\d s"
        for report, line in zip(reports, [*lines, f"WAIT: timed out; {cause}"]):
            self.assertRegex(report, rf"^\[rank {rank}\] " + line.replace("WAIT", wait) + "$", self.output)

    def test_timeout_names_operation_peer_action_and_seconds(self):
        self.check_hang("timed_out", 0, "all ranks answer, so .*",
                        [r"rank 0 \(pid \d+ on host .+\): waits: WAIT", r"rank 1 \(.*\): computes",
                         r"rank 2 \(.*\): computes"])

    def check_rank_1_hangs(self, mode, seen):
        self.check_hang(mode, 0, rf"rank 1 \(pid \d+ on host .+\) does not answer: {seen}",
                        [r"rank 0 \(.*\): is rank 0 in step 7, waits: WAIT", rf"rank 1 \(.*\): no answer; {seen}",
                         r"rank 2 \(.*\): is rank 2 in step 7, waits: WAIT"])

    def test_a_rank_that_is_stopped_is_named_by_one(self):
        self.check_rank_1_hangs("stopped", "it is stopped, by a signal or a debugger")
        self.assertEqual(self.stack, [])  # it says nothing, and nobody waits for that

    def test_a_rank_that_loops_is_named_by_one_and_says_where(self):
        self.check_rank_1_hangs("loops", "it computes, in an operator or in the program's own code")
        self.assertRegex(self.stack[0], r"#0 failing_world\+0x")
        self.assertRegex("\n".join(self.stack), r"#\d+ __libc_start_main in libc")

    def test_ranks_that_wait_for_each_other_all_answer(self):
        self.check_hang("circle", "[012]", "all ranks answer, so they wait for each other, or for a call that one of them does not make",
                        [rf"rank {rank} \(.*\): waits: WAIT" for rank in range(3)])

    def test_the_code_of_the_job_is_that_of_the_cause(self):
        self.run_failing("out_of_memory")
        self.assertEqual(self.code, 8, self.output)

    def start_ready(self, mode):
        """Every rank has said that it is ready."""
        job = self.start_mode(mode)
        for _ in range(3):
            while "ready" not in (line := job.stdout.readline()):
                self.assertTrue(line, "ended before it was ready")
        return job

    def test_ranks_of_one_host_listen_nowhere(self):
        """But for the store of torch.distributed, which rank 0 keeps where torchrun does not."""
        job = self.start_ready("interrupted")
        ranks = [pid for pid in worlds.processes_with(self.token) if worlds.name_of(pid) == "failing_world"]
        self.assertEqual(len(ranks), 3)
        self.assertLessEqual(sum(len(worlds.listening_ports(pid)) for pid in ranks), "start_ranks" in self.mpirun[0])
        job.terminate()
        self.finish(job)

    def test_a_request_to_stop_that_nobody_expects_ends_the_job(self):
        job = self.start_ready("interrupted")
        job.send_signal(signal.SIGUSR1)
        reports = worlds.reports(self.finish_ranks(job))
        self.assertGreaterEqual(len(reports), 1, self.output)
        for line in reports:
            self.assertIn("ended by SIGTERM", line)

    def test_interrupted_job_ends_and_says_so(self):
        job = self.start_ready("interrupted")
        job.terminate()
        reports = worlds.reports(self.finish_ranks(job))
        self.assertGreaterEqual(len(reports), 1, self.output)
        for line in reports:
            self.assertIn("ended by SIGTERM", line)


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
