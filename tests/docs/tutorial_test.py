"""Runs the programs of docs/tutorial.md: the plain loop, and smp on 1, 2 and 3 processes, print the same losses, also when a
run of two processes stops in the middle and one of three goes on.

  tutorial_test.py BIN_DIR HAVE_MPI
"""

import subprocess
import sys
import tempfile


def losses(command, folder):
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def main():
    binaries, have_mpi = sys.argv[1:]
    program, smp_run = f"{binaries}/tutorial", [f"{binaries}/smp", "run", "-np"]
    with tempfile.TemporaryDirectory() as folder:
        plain, alone = losses([f"{binaries}/tutorial_plain"], folder), losses([program], folder)
        assert [line[:3] for line in plain] == [["step", f"{step}", "loss"] for step in range(0, 40, 10)], plain
        assert [line[:3] for line in alone] == [line[:3] for line in plain], alone
        for one, other in zip(plain, alone):
            assert abs(float(one[3]) - float(other[3])) < 2e-3, f"plain {one}, smp {other}"
        if have_mpi not in ("1", "ON", "TRUE"):
            return
        for processes in ("2", "3"):
            together = losses([*smp_run, processes, program], folder)
            assert together == alone, f"{processes} processes print {together}, one prints {alone}"
        halves = losses([*smp_run, "2", program, "20"], folder) + losses([*smp_run, "3", program, "40", "saved"], folder)
        assert halves == alone, f"stopped and resumed: {halves}, one run: {alone}"


if __name__ == "__main__":
    main()
