"""Runs a test file on 1, 2, ... processes, one after the other. Usage: run_ranks.py FILE RANKS...

The processes are forks, connected by sockets as under torchrun: each import of torch, what its optimizers load, and
transformers take seconds, and here happen once.
"""

import importlib.util
import pathlib
import runpy
import sys

import support
import torch._dynamo  # which the first optimizer loads

import smdistributed.modelparallel.torch  # noqa: F401


def main(path, *counts):
    if "transformers" in pathlib.Path(path).read_text() and importlib.util.find_spec("transformers"):
        from transformers import GPT2Model  # noqa: F401: with all that models load
    sys.argv = [path]
    for count in map(int, counts):
        print(f"{path} on {count} processes", flush=True)
        errors = support.fork_ranks(count, lambda: runpy.run_path(path, run_name="__main__"), {})
        if errors:
            sys.exit(errors)


main(*sys.argv[1:])
