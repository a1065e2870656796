"""How many processes accelerate, on which Hugging Face's Trainer stands, believes to share the data."""

import json
import os
import sys
import warnings

from smdistributed.modelparallel import _engine


def hide_stages():
    """After smp.init. accelerate gives each of the launcher's processes data of its own, which is right for replicas, but ranks
    of one pipeline work on the same. The first variable that it looks at is MPICH's, for which MPI has no more use."""
    if _work_on_the_same():
        os.environ["PMI_SIZE"] = "1"


def check():
    """When a model is made: that accelerate has heard of it."""
    state = sys.modules.get("accelerate.state")
    processes = state.PartialState._shared_state.get("num_processes") if state else None
    if processes is None or not _work_on_the_same():
        return
    if processes != 1:
        raise RuntimeError(
            "DistributedModel: expected accelerate to count 1 process, since ranks of one pipeline work on the same data, got "
            f"{processes}, to each of which it gives data of its own. Call smp.init, or import transformers' Trainer, before "
            "Accelerator() is made, and unset LOCAL_RANK."
        )
    if not _is_laid_out_later() and _engine.dp_size() > 1:
        warnings.warn(
            f"accelerate counts one process, so it gives all {_engine.dp_size()} replicas the same data. Give each its own "
            "by a sampler for smp.dp_rank() of smp.dp_size(), or start one pipeline only.",
            stacklevel=3,
        )


def _work_on_the_same():
    return _is_laid_out_later() or _engine.mp_size() > 1


def _is_laid_out_later():
    """By the first step, which every rank gives the whole batch."""
    return json.loads(_engine.config())["parallelism"] == "auto"
