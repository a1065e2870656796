"""Objects and groups between processes, and what a job says where ranks disagree; the program of docs/communication.md.

Usage: comm_processes_test.py COMMUNICATION_PAGE COMM_PROCESSES MPIRUN [mpirun flag ...]
"""

import functools
import sys

import worlds

# case -> (rank that reports it, texts of its report)
ENDS = {
    "broadcast_in_another_group": (2, ("peer rank 0", "action smp::recv_from of int", "timed out")),
    "send_without_receiver": (0, ("peer rank 3", "action smp::send of int, which waits until rank 3 calls recv_from",
                                  "timed out")),
    "barrier_without_partner": (0, ("peer rank 1", "action barrier of PP_GROUP, which waits until rank 1 calls it too",
                                    "timed out")),
    "another_type": (1, ("smp::recv_from: expected an object of type std::string from rank 0, got one of type double",)),
    "outsider": (3, ("smp::barrier: expected a call on a member of the process group {0, 1, 2}, got one on rank 3",)),
}


class CommProcesses(worlds.WorldTestCase):
    def run_world(self, *arguments, num_ranks=4, program=None):
        if program:
            self.program = program
        job = self.start(num_ranks, *arguments)
        return self.finish(job), job.returncode

    def test_objects_and_groups_arrive(self):
        for case in ("large_and_small", "groups"):
            with self.subTest(case):
                lines, code = self.run_world(case)
                self.assertEqual(code, 0, self.output)
                self.assertEqual(lines, ["done"] * 4, self.output)

    def check_disagreement(self, case):
        rank, texts = ENDS[case]
        lines, code = self.run_world(case)
        self.assertNotEqual(code, 0, self.output)
        last = worlds.reports(lines)[-1]
        self.assertTrue(last.startswith(f"[rank {rank}]"), self.output)
        for text in texts:
            self.assertIn(text, last)

    def test_calls_that_differ_are_named(self):
        lines, code = self.run_world("different_calls")
        self.assertNotEqual(code, 0, self.output)
        self.assertIn("barrier of WORLD on rank 3", worlds.reports(lines)[-1])
        self.assertIn("allgather of WORLD on rank", worlds.reports(lines)[-1])

    def test_lists_that_differ_are_refused_on_every_rank(self):
        lines, code = self.run_world("different_lists")
        self.assertNotEqual(code, 0, self.output)
        self.assertIn("expected the same list on all ranks, got {0, 1} on rank 0 and {0, 2} on rank 3", self.output)

    def test_the_page_prints_what_it_says(self):
        for num_ranks in (1, 2, 4):
            with self.subTest(num_ranks=num_ranks):
                lines, code = self.run_world(num_ranks=num_ranks, program=PAGE)
                self.assertEqual(code, 0, self.output)
                self.assertIn("vocabulary of 3 words on every rank", lines)
                self.assertIn(f"{num_ranks} hosts, accuracy {(num_ranks + 1) / 2 / num_ranks:g}", lines)


for _case in ENDS:
    setattr(CommProcesses, f"test_{_case}_ends_the_job_with_its_cause",
            functools.partialmethod(CommProcesses.check_disagreement, _case))

if __name__ == "__main__":
    PAGE = sys.argv[1]
    worlds.main(sys.argv[2:])
