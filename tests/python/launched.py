"""Runs a test file under a launcher, on ranks that are forks of one process that has imported torch. Usage: FILE LAUNCHER ..."""

import contextlib
import importlib.util
import pathlib
import subprocess
import sys

from forked import ForkedScripts


def main(path, *launcher):
    has_transformers = "transformers" in pathlib.Path(path).read_text() and importlib.util.find_spec("transformers")
    with contextlib.closing(ForkedScripts(*["transformers.models.gpt2.modeling_gpt2"] * bool(has_transformers))) as scripts:
        sys.exit(subprocess.call([*launcher, *scripts.command(path)]))


main(*sys.argv[1:])
