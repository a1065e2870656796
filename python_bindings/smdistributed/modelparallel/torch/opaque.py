"""Code of Python that a graph cannot hold, run as one operator on the rank of its stage: custom autograd functions."""

import base64
import io
import pickle
import warnings

import torch
import torch.utils.checkpoint

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.containers import map_leaves

_structures = {}  # by call: what it returned when it was recorded, with _TensorAt in place of tensors


class _TensorAt:
    def __init__(self, index):
        self.index = index


class _Arguments(pickle.Pickler):
    """Of a call, as other ranks will have them. Functions and classes go by name."""

    def persistent_id(self, value):
        if isinstance(value, (torch.Tensor, torch.nn.Module)):
            raise pickle.PicklingError(f"a {type(value).__name__} within an object")
        return None


def _run(tensors, details):
    """On the rank of the stage, and on zeros where the call is recorded."""
    function, args, kwargs = pickle.loads(base64.b64decode(details))

    def filled(value):
        return tensors[value.index] if isinstance(value, _TensorAt) else value

    returned = _apply.__get__(None, function)(*map_leaves(args, filled), **map_leaves(kwargs, filled))
    found = []
    structure = map_leaves(returned, _keeping(found))
    if len(_structures) == 65536:  # arguments that differ with every call
        del _structures[next(iter(_structures))]
    _structures[details] = structure
    return found


def _keeping(tensors):
    def keep(value):
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _TensorAt(len(tensors) - 1)

    return keep


def _call(function, args, kwargs):
    tensors = []
    keep = _keeping(tensors)
    call = (function, map_leaves(args, keep), map_leaves(kwargs, keep))
    file = io.BytesIO()
    try:
        _Arguments(file).dump(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"{function.__qualname__}: expected a custom autograd function that other ranks can find and call, with tensors and "
            f"plain values as arguments, got one that cannot be sent ({error}). Define it at the top of a module, and give it "
            "the tensors that it works on one by one."
        ) from error
    details = base64.b64encode(file.getvalue()).decode()
    found = _engine.call_opaque(tensors, details)
    return map_leaves(_structures[details], lambda value: found[value.index] if isinstance(value, _TensorAt) else value)


_engine.set_opaque(_run)

# A custom autograd function has a backward of its own, which operators of its forward would not tell of.
_apply = torch.autograd.Function.__dict__["apply"]


def _applying(cls, *args, **kwargs):
    plain = _apply.__get__(None, cls)
    if not _engine.is_capturing() or torch._C._are_functorch_transforms_active():
        return plain(*args, **kwargs)
    needs_gradient = []
    map_leaves((args, kwargs), lambda value: needs_gradient.append(isinstance(value, torch.Tensor) and value.requires_grad))
    needs_gradient = torch.is_grad_enabled() and any(needs_gradient)
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return _without_recomputing(needs_gradient, *args)
    return _call(cls, args, kwargs) if needs_gradient else plain(*args, **kwargs)


torch.autograd.Function.apply = classmethod(_applying)


# torch.utils.checkpoint changes no number, only what is kept in memory. Patched is what it is made of, since others import
# the function itself.
def _warn_of_checkpoint():
    warnings.warn(
        "torch.utils.checkpoint in a step: activations are kept, since stages do not recompute yet. The numbers are the same.",
        stacklevel=3,
    )


def _without_recomputing(needs_gradient, function, preserve_rng_state, *args):
    """A reentrant one, which has no backward where none of its arguments asks for one."""
    _warn_of_checkpoint()
    with torch.set_grad_enabled(needs_gradient):
        return function(*args)


def _around(generator):
    def around(*args, **kwargs):
        if not _engine.is_capturing():
            return generator(*args, **kwargs)
        _warn_of_checkpoint()
        return iter([None])

    return around


torch.utils.checkpoint._checkpoint_without_reentrant_generator = _around(
    torch.utils.checkpoint._checkpoint_without_reentrant_generator
)
