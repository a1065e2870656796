"""Checks that every C++ file is as clang-format leaves it; `make format` mends that."""

import pathlib
import subprocess
import sys

FOLDERS = ("smp", "partitioner", "runtime", "tools", "examples", "benchmarks", "python_bindings", "tests")


def main(root, clang_format):
    root = pathlib.Path(root)
    files = sorted(str(file) for folder in FOLDERS for file in (root / folder).rglob("*") if file.suffix in (".h", ".cpp"))
    if len(files) < 100:
        sys.exit(f"expected the C++ files of the project under {root}, got {len(files)}")
    return subprocess.run([clang_format, "--dry-run", "--Werror", "--ferror-limit=1", *files]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
