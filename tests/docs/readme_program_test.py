"""Runs the README's program on 1, 2 and 3 processes: it learns, and prints the same losses each time. With an interpreter runs its
twin in Python on 1 and 2, which prints what the program in C++ prints.

  readme_program_test.py PROGRAM SMP HAVE_MPI [README PYTHON]
"""

import pathlib
import subprocess
import sys
import tempfile

from extract_blocks import blocks_of


def losses(command):
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def check_splits(command, counts, smp, have_mpi, alone):
    for processes in counts if have_mpi in ("1", "ON", "TRUE") else ():
        together = losses([smp, "run", "-np", processes, *command])
        assert together == alone, f"{processes} processes print other losses: {together[-1]} against {alone[-1]}"


def main():
    program, smp, have_mpi, *twin = sys.argv[1:]
    alone = losses([program])
    if not twin:
        assert len(alone) == 100, f"expected 100 lines, got {len(alone)}"
        assert float(alone[-1][1]) < 0.7 * float(alone[0][1]), f"did not learn: {alone[0]} ... {alone[-1]}"
        check_splits([program], "23", smp, have_mpi, alone)
        return
    readme, python = twin
    (code,) = (code for language, code, _ in blocks_of(pathlib.Path(readme).read_text()) if language == "python")
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "program.py")
        script.write_text(code)
        in_python = losses([python, script])
        assert in_python == alone, f"Python prints {in_python[-1]}, C++ {alone[-1]}"
        check_splits([python, script], "2", smp, have_mpi, alone)


if __name__ == "__main__":
    main()
