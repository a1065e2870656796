"""Calls that fail on every rank where they fail on one."""

import pickle

from smdistributed.modelparallel.torch.comm import gathered

# What travels to other ranks: their constructors take a text.
_KINDS = (FileNotFoundError, OSError, pickle.UnpicklingError, TypeError, ValueError, ImportError, NotImplementedError)


def agreed(caller, call):
    """What `call` returns on this rank, once it has returned on all. Where it fails, all ranks raise what the first of them did.
    Collective over all ranks; `call` is not to be."""
    result, failure, cause = None, None, None
    try:
        result = call()
    except Exception as error:
        kind = next((each for each in _KINDS if isinstance(error, each)), RuntimeError)
        failure, cause = (kind, str(error)), error
    for rank, failed in enumerate(gathered(caller, failure)):
        if failed is not None:
            kind, text = failed
            raise kind(f"{caller}: {text}" + (f" (on rank {rank})" if rank else "")) from cause
    return result
