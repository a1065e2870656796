"""Runs the README's program on 1, 2 and 3 processes: it learns, and prints the same losses each time.

  readme_program_test.py PROGRAM SMP HAVE_MPI
"""

import subprocess
import sys


def losses(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def main():
    program, smp, have_mpi = sys.argv[1:]
    alone = losses([program])
    assert len(alone) == 100, f"expected 100 lines, got {len(alone)}"
    assert float(alone[-1][1]) < 0.7 * float(alone[0][1]), f"did not learn: {alone[0]} ... {alone[-1]}"
    if have_mpi not in ("1", "ON", "TRUE"):
        return
    for processes in ("2", "3"):
        together = losses([smp, "run", "-np", processes, program])
        assert together == alone, f"{processes} processes print other losses: {together[-1]} against {alone[-1]}"


if __name__ == "__main__":
    main()
