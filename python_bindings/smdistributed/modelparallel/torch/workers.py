"""Processes that multiprocessing starts for a rank, as a DataLoader's workers: spawned, they run the top of the script again, and
with it smp.init, but they are no ranks."""

import contextlib
import json
import multiprocessing
import os
import sys

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import logs

_VARIABLE = "SMP_RANK_OF_WORKERS"  # which children inherit
_OF_RANKS = ("RANK", "WORLD_SIZE")  # with others than its parent's, a child is a rank that mp.spawn has started
_NUMBERS = [f"{of}{what}" for of in ("", "local_", "pp_", "dp_", "mp_", "tp_", "rdp_") for what in ("rank", "size")]


def tell_them():
    """Called on a rank, which they ask for its numbers."""
    numbers = {}
    for name in _NUMBERS:
        with contextlib.suppress(RuntimeError):  # with parallelism=auto the first step will say
            numbers[name] = getattr(_engine, name)()
    level = json.loads(_engine.config())["log_level"]
    os.environ[_VARIABLE] = json.dumps({"numbers": numbers, "variables": _variables(), "log_level": level})


def forget_them():
    os.environ.pop(_VARIABLE, None)


def _variables():
    return [os.environ.get(name) for name in _OF_RANKS]


def is_one():
    # While the top of the script runs again, multiprocessing has not set parent_process yet, but has renamed the main module.
    runs_again = getattr(sys.modules.get("__mp_main__"), "__name__", None) == "__mp_main__"
    is_child = runs_again or multiprocessing.parent_process() is not None
    return is_child and _VARIABLE in os.environ and _rank()["variables"] == _variables()


def _rank():
    return json.loads(os.environ[_VARIABLE])


def begin():
    """In place of smp.init. Says once what this process is."""
    numbers = _rank()["numbers"]
    own = f"this process works for rank {numbers['rank']} of {numbers['size']}, started by multiprocessing (a DataLoader's worker?)"
    global _how_to_begin, _has_spoken
    _how_to_begin = (
        f"But {own}, and is no rank: it has run the top of the script again, where smp.init does nothing for it. Put what ranks "
        'alone do behind if __name__ == "__main__":'
    )
    _engine.be_worker(numbers, _how_to_begin)
    if _rank()["log_level"] == "info" and not _has_spoken:
        logs.say(f"smp.init: {own}, and is no rank. It does nothing here; smp.rank() and its like answer for that rank.")
    _has_spoken = True


def how_to_begin():
    """Ends the refusal of a call that comes without smp.init."""
    return _how_to_begin


_how_to_begin = "Call smp.init() first in the script, on every rank."
_has_spoken = False
