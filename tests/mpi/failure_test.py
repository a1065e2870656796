"""Starts worlds of real processes that fail, and checks how they end.

Usage: failure_test.py FAILING_WORLD MPIRUN [mpirun flag ...]. Every world must end by itself,
name the culprit as its last word, and leave no process.
"""

import re
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
        self.assertNotEqual(job.returncode, 0, self.output)
        return lines

    def test_world_that_finishes_says_nothing(self):
        job = self.start_mode("finish")
        lines = self.finish_ranks(job)
        self.assertEqual(job.returncode, 0, self.output)
        self.assertEqual(worlds.reports(lines), [])

    def test_throw_is_the_last_line_and_the_only_report(self):
        for _ in range(10):
            lines = self.run_failing("throw_in_exchange")
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

    def test_timeout_names_operation_peer_action_and_seconds(self):
        reports = worlds.reports(self.run_failing("timed_out"))
        self.assertEqual(len(reports), 1, self.output)
        self.assertTrue(re.fullmatch(
            r"\[rank 0\] receive of at most 4 bytes with tag 5, peer rank 1, action 2F0, "
            r"after \d+\.\d s: timed out", reports[0]), self.output)

    def test_interrupted_job_ends_and_says_so(self):
        job = self.start_mode("interrupted")
        for line in job.stdout:
            if "ready" in line:
                break
        job.terminate()
        reports = worlds.reports(self.finish_ranks(job))
        self.assertGreaterEqual(len(reports), 1, self.output)
        for line in reports:
            self.assertIn("ended by SIGTERM", line)


if __name__ == "__main__":
    worlds.main(sys.argv[1:])
