"""Code of Python that a graph cannot hold, run as one operator on the rank of its stage: custom autograd functions, and modules
that opaque() was given."""

import base64
import contextlib
import functools
import inspect
import io
import pickle

import torch
import torch.utils.checkpoint

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.comm import CommGroup, gathered
from smdistributed.modelparallel.torch.containers import map_leaves
from smdistributed.modelparallel.torch.recomputation import recomputed
from smdistributed.modelparallel.torch.registered import changed_in, put_back, registered_in

_modules = []  # by number: those of opaque(), made on all ranks in the same order
_structures = {}  # by call and sizes of its tensors: the containers that it returned when it was recorded


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
    target, args, kwargs = pickle.loads(base64.b64decode(details))

    def filled(value):
        return tensors[value.index] if isinstance(value, _TensorAt) else value

    function = functools.partial(_run_module, target) if isinstance(target, int) else _apply.__get__(None, target)
    args, kwargs = map_leaves(args, filled), map_leaves(kwargs, filled)
    before = _plain_parts(args, kwargs)
    try:
        returned = function(*args, **kwargs)
    except NotImplementedError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "leaf Variable that requires grad has been used in an in-place operation" in str(error):
            raise NotImplementedError(
                f"{_name_of(target)}: expected a call that leaves its tensors as they are, got one that writes to one of them "
                "(ctx.mark_dirty). Let it clone() what it writes to."
            ) from error
        stand_ins = _engine.opaque_stand_ins()
        if stand_ins is None:
            raise
        raise RuntimeError(
            f"{_name_of(target)}: expected a call that can be recorded on {stand_ins}, from which a step learns the sizes of its results, got "
            f"{type(error).__name__}: {error}. Make it safe for zeros (lengths.clamp_min(1)), or compute what may not be zero from "
            "arguments of the step alone: their values are taken where zeros are not."
        ) from error
    if _plain_parts(args, kwargs) != before:
        raise NotImplementedError(
            f"{_name_of(target)}: expected a call that leaves its arguments as they are, got one that writes to a container or an object among "
            "them. It gets copies: return tensors in place of that."
        )
    found = []
    structure = map_leaves(returned, _keeping(found))
    map_leaves(structure, functools.partial(_check_result, target))
    key = _key(details, tensors)
    if len(_structures) == 65536:  # arguments that differ with every call
        del _structures[next(iter(_structures))]
    _structures[key] = structure
    return found


def _name_of(target):
    return type(_modules[target].module).__qualname__ if isinstance(target, int) else target.__qualname__


def _key(details, tensors):
    return details, tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def _plain_parts(args, kwargs):
    return pickle.dumps(map_leaves((args, kwargs), lambda value: None if isinstance(value, torch.Tensor) else value))


def _check_result(target, value):
    if value is not None and not isinstance(value, _TensorAt):
        raise NotImplementedError(
            f"{_name_of(target)}: expected tensors as results, in containers or alone, got a {type(value).__name__} among them. It runs after the "
            "body, which cannot have its values: return torch.tensor(value), or compute them in the body."
        )


def _keeping(tensors):
    def keep(value):
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return _TensorAt(len(tensors) - 1)

    return keep


def _call(target, args, kwargs):
    tensors = []
    keep = _keeping(tensors)
    call = (target, map_leaves(args, keep), map_leaves(kwargs, keep))
    file = io.BytesIO()
    try:
        _Arguments(file).dump(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotImplementedError(
            f"{_name_of(target)}: expected a call that another rank can make, with tensors and plain values as arguments, got one that cannot "
            f"be sent ({error}). Define a custom autograd function at the top of a module, and give it the tensors that it works "
            "on one by one."
        ) from error
    details = base64.b64encode(file.getvalue()).decode()
    found = _engine.call_opaque(tensors, details)
    return map_leaves(_structures[_key(details, tensors)], lambda value: found[value.index] if isinstance(value, _TensorAt) else value)


_engine.set_opaque(_run)


def opaque(module):
    """Returns `module`, whose forward from now on runs as one operator, by its own code: loops over data, other libraries. Called on
    all ranks, before the first step.

    It takes tensors and plain values, in containers, and returns tensors whose sizes follow from theirs: a step learns them
    from a call on zeros; where that raises, from one on the values that arguments of the step alone decide. Gradients that it
    computes by torch.autograd.grad or torch.func train what it was given. Buffers that it writes to or replaces are refused, as are parameters and submodules that it replaces.
    Attributes that change between steps change on all ranks. One that forward changes, as a count of its calls, changes on the
    rank of its stage, and with each call on zeros on pp_rank 0: let the caller count, and pass the number.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"opaque: expected a torch.nn.Module, got {type(module).__name__}.")
    own = type(module)
    module.__class__ = type(own.__name__, (_Opaque, own), {})
    _add(module)
    return module


def _add(module):
    module._opaque_number = len(_modules)
    _modules.append(_Plain(module))


def check_order(module):
    """In the first step, on all ranks of the pipeline: a call of a module names it by its number. None where the module's model
    is gone, which ranks need not find at the same time."""
    named = [] if module is None else module.named_modules()
    numbers = {path: each._opaque_number for path, each in named if isinstance(each, _Opaque)}
    for rank, (is_gone, others) in enumerate(gathered("opaque", (module is None, numbers), CommGroup.PP_GROUP)):
        if is_gone or module is None:
            continue
        differing = [path for path in {**numbers, **others} if numbers.get(path) != others.get(path)]
        if differing:
            raise ValueError(
                f"opaque: expected calls for the same modules in the same order on all ranks, got others on pp_rank {rank} than on "
                f"{_engine.pp_rank()} (the first that differs is {differing[0] or 'the model itself'}). Call smp.opaque before the "
                "first step, and under no condition of the rank."
            )


class _Opaque:
    """What is different about a module that opaque() was given, and about its copies."""

    def __setstate__(self, state):
        super().__setstate__(state)
        _add(self)

    def forward(self, *args, **kwargs):
        if not _engine.is_capturing():
            return super().forward(*args, **kwargs)
        state = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        is_training = [each.training for each in self.modules()]
        return _call(self._opaque_number, (state, is_training, *args), kwargs)


class _Plain(torch.nn.Module):
    """Calls forward alone: hooks have been around it in the body."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        registered = registered_in(self.module)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        data = {name: tensor.detach() for name, tensor in tensors.items()}
        returned = self.module.forward(*args, **kwargs)
        names = [name for name, tensor in tensors.items() if not _has(tensor, data[name])]
        for changed, own, before in list(changed_in(registered)):
            names += changed
            put_back(own, before)
        if names:
            raise NotImplementedError(
                f"{type(self.module).__qualname__}: expected a forward that leaves the parameters, buffers and submodules of its module "
                f"in their places, got others for {', '.join(names)}. It is called with tensors that are gone after it, so what it "
                "assigns is lost. Make them in the constructor, and return what is to be kept: the body may write it to a buffer in "
                "place (self.mean.copy_(new))."
            )
        return returned


def _has(tensor, data):
    """Other memory with the same numbers, as flatten_parameters() makes it, does no harm."""
    if tensor.is_set_to(data):
        return True
    return (tensor.shape, tensor.dtype) == (data.shape, data.dtype) and torch.equal(tensor, data)


def _run_module(number, state, is_training, *args, **kwargs):
    plain = _modules[number]
    for each, trains in zip(plain.module.modules(), is_training, strict=True):
        each.training = trains
    return torch.func.functional_call(plain, {f"module.{name}": value for name, value in state.items()}, args, kwargs)


# A custom autograd function has a backward of its own, which operators of its forward would not tell of.
_apply = torch.autograd.Function.__dict__["apply"]


def _applying(cls, *args, **kwargs):
    plain = _apply.__get__(None, cls)
    if not _engine.is_capturing() or torch._C._are_functorch_transforms_active():
        return plain(*args, **kwargs)

    def needs(values):
        return torch.is_grad_enabled() and any(isinstance(value, torch.Tensor) and value.requires_grad for value in values)

    if cls is torch.nn.modules._functions.BackwardHookFunction:
        raise NotImplementedError(
            "expected modules without backward hooks in a step, got one with register_full_backward_hook or "
            "register_full_backward_pre_hook. The backward runs after the body, on other tensors. Hook parameters outside of the step, or "
            "change the gradient by a custom autograd function."
        )
    if cls is torch.utils.checkpoint.CheckpointFunction:
        return _recomputing(needs(args), *args)  # which looks into no container
    values = []
    map_leaves((args, kwargs), values.append)
    needs_gradient = needs(values)
    return _call(cls, args, kwargs) if needs_gradient else plain(*args, **kwargs)


torch.autograd.Function.apply = classmethod(_applying)


# torch.utils.checkpoint, of which others import the function itself, so that what it is made of is patched. Buffers, as those
# of batch norm, are written once, where torch writes them in both forwards.
def _recomputing(needs_gradient, function, preserve_rng_state, *args):
    """A reentrant one, which has no backward where none of its arguments asks for one."""
    del preserve_rng_state
    with torch.set_grad_enabled(needs_gradient), recomputed():
        return function(*args)


def _around(generator):
    parameters = inspect.signature(generator)

    def around(*args, **kwargs):
        if not _engine.is_capturing():
            return generator(*args, **kwargs)
        context_fn = parameters.bind(*args, **kwargs).arguments.get("context_fn")
        return _within(context_fn()[0] if context_fn else contextlib.nullcontext())

    return around


def _within(context):
    """Around the function: until torch asks once more."""
    chooses_what_is_kept = isinstance(context, (torch.utils._python_dispatch.TorchDispatchMode, torch.autograd.graph.save_on_cpu))
    with contextlib.nullcontext() if chooses_what_is_kept else context, recomputed():
        yield


for _name in ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"):  # torch 2.11, 2.15
    if hasattr(torch.utils.checkpoint, _name):
        setattr(torch.utils.checkpoint, _name, _around(getattr(torch.utils.checkpoint, _name)))
