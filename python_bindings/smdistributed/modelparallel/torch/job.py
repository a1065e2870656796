"""Start and end of a job, and who this process is in it."""

import atexit
import json
import os
import sys
import traceback

import torch  # its libraries, before the extension that links them  # noqa: F401

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel._engine import (  # noqa: F401
    dp_rank,
    dp_size,
    get_dp_group,
    get_mp_group,
    get_pp_group,
    get_rdp_group,
    get_tp_group,
    get_world_group,
    is_initialized,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)


def init(config=None):
    """Joins the job that the launcher started, and fixes the configuration. First call of every script, on every rank.

    `config`: a dict of keys (docs/configuration.md), each overridden by SMP_CONFIG and SM_HP_MP_PARAMETERS. Raises ValueError,
    on every rank and before anything else happens, for a configuration with errors, all of them at once.
    """
    _engine.init(json.dumps(config or {}))
    sys.excepthook = _end_with(sys.excepthook)
    atexit.register(_leave)


def shutdown():
    """Leaves the job; collective. A script that ends does so by itself."""
    _engine.shutdown()


def _leave():
    if not _engine.is_initialized():
        return
    try:
        _engine.shutdown()
    except Exception:  # the end of a script has no caller
        sys.excepthook(*sys.exc_info())


def _end_with(previous):
    """The hook for an exception that nobody handles: its traceback, then the end of the job."""

    def hook(kind, error, trace):
        if not _engine.is_initialized() or issubclass(kind, KeyboardInterrupt):
            previous(kind, error, trace)
            return
        is_of_other = isinstance(error, (_engine.AbortedError, _engine.PeerLostError))
        if not is_of_other:
            previous(kind, error, trace)
        message = "".join(traceback.format_exception_only(kind, error)).strip()
        code = _engine.report_failure(message, is_of_other)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the others may be gone, so nothing collective may come after

    return hook
