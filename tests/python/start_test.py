"""One process without a launcher: beside an MPI that has started by itself, with workers, and with ranks that it spawns."""

import os
import pathlib
import subprocess
import sys
import unittest

SCRIPT = pathlib.Path(__file__).with_name("start_script.py")


def run(test, how):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMIX_"))}
    ended = subprocess.run([sys.executable, str(SCRIPT), how], capture_output=True, text=True, check=False, env=environment)
    test.assertEqual(ended.returncode, 0, ended.stderr)
    *lines, last = ended.stdout.splitlines()
    test.assertEqual(last, "ended")
    return lines, ended.stderr


class Start(unittest.TestCase):
    @unittest.skipUnless("MPIRUN" in os.environ, "a build without MPI")
    def test_beside_an_mpi_that_nobody_launched(self):
        run(self, "singleton")

    def test_of_workers_is_not_that_of_ranks(self):
        for how in ("spawn", "forkserver", "fork"):
            with self.subTest(how):
                (rows, *refusals), log = run(self, how)
                self.assertEqual(rows, str([[index, 0, 1, 0, 1, 0] for index in range(4)]))
                if how == "fork":
                    continue
                (refusal,) = refusals
                self.assertRegex(refusal, r"^False DistributedModel: expected .* works for rank 0 of 1.*, and is no rank: .*__main__")
                said = log.count("is no rank. It does nothing here")
                self.assertIn(said, (1, 2), log)  # by each of the two processes, or by the server that both are forks of

    def test_of_ranks_that_are_spawned(self):
        """By a process that is no rank, and by one that is."""
        for how in ("ranks", "ranks of a rank"):
            with self.subTest(how):
                run(self, how)


if __name__ == "__main__":
    unittest.main()
