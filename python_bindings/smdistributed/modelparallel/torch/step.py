"""The step function: a loop body written for one batch, run as a pipeline of microbatches."""

import contextlib
import dataclasses
import inspect
import pickle
import sys

import torch
import torch.utils.data

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import logs
from smdistributed.modelparallel.torch.beside_tensors import dumps, loads
from smdistributed.modelparallel.torch.containers import map_leaves
from smdistributed.modelparallel.torch.model import (
    DistributedModel,
    check_gradient_hooks,
    check_hooks,
    check_registered,
    note_gradient_hooks,
    put_back_registered,
)


class StepOutput:
    """One tensor per microbatch, the same on every rank; detached, and the caller's own."""

    _rows = None  # of the batch, by microbatch, where they differ

    def __init__(self, outputs):
        self.outputs = list(outputs)

    def reduce_mean(self):
        """Mean over microbatches, of the shape of one. Where an evaluation's microbatches differ in rows, they weigh by them:
        means over rows become that of the batch."""
        if self._rows is None:
            return torch.stack(self.outputs).mean(0)
        return sum(rows * output for rows, output in zip(self._rows, self.outputs, strict=True)) / sum(self._rows)

    def reduce_sum(self):
        return torch.stack(self.outputs).sum(0)

    def concat(self):
        """Along dimension 0: the results of the batch."""
        return torch.cat(self.outputs)

    def stack(self):
        """A new first dimension, one entry per microbatch."""
        return torch.stack(self.outputs)

    def detach(self):
        return self

    def __len__(self):
        return len(self.outputs)

    def __getitem__(self, microbatch):
        return self.outputs[microbatch]

    def __iter__(self):
        return iter(self.outputs)

    def __repr__(self):
        return f"StepOutput({self.outputs})"

    def __getattr__(self, name):
        if not name.startswith("_") and hasattr(torch.Tensor, name):
            raise AttributeError(_one_of_each(name))
        raise AttributeError(f"'StepOutput' object has no attribute '{name}'")

    def __format__(self, form):
        if form:
            raise TypeError(_one_of_each(f"__format__ of '{form}'"))
        return str(self)


def _one_of_each(what):
    return (
        f"StepOutput.{what}: expected a tensor, got one of each microbatch. Make one of them first: reduce_mean() "
        "(a loss: loss.reduce_mean().item()), reduce_sum(), concat() or stack()."
    )


def _refuse_operator(name):
    def refuse(self, *others):
        raise TypeError(_one_of_each(name))

    return refuse


for _name in ("float", "int", "neg", "lt", "le", "gt", "ge", *(r + o for r in ("", "r") for o in ("add", "sub", "mul", "truediv"))):
    setattr(StepOutput, f"__{_name}__", _refuse_operator(f"__{_name}__"))


def step(function=None, *, non_split_inputs=(), input_split_axes=None, detach_outputs=True):
    """Turns a function into a step function, with or without options.

    non_split_inputs: names of arguments that every microbatch gets whole. input_split_axes: by name, the dimension along which
    an argument is cut; 0 for the others. Results are always detached: they exist on ranks that have no graph of them.

    The body runs on pp_rank() 0 only, on tensors that have shapes but no data, and gets copies of the containers among its
    arguments. Arguments of other ranks are ignored, and what the body does to Python's objects happens on that rank alone: return
    what others are to know.
    """
    if not detach_outputs:
        raise NotImplementedError(
            "step: expected detach_outputs=True, got False. Results are on every rank, and only stages have a graph of them."
        )
    if function is None:
        return lambda given: StepFunction(given, non_split_inputs, input_split_axes or {})
    return StepFunction(function, non_split_inputs, input_split_axes or {})


class StepFunction:
    """A callable that does not bind: one in a class body is called without self."""

    def __init__(self, function, non_split_inputs, input_split_axes):
        self._function = function
        self._signature = inspect.signature(function)
        self._whole = frozenset(non_split_inputs)
        self._axes = dict(input_split_axes)
        self._number = _engine.StepNumber()
        unknown = sorted((self._whole | set(self._axes)) - set(self._signature.parameters))
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values()):
            raise ValueError(
                f"step: expected names of arguments of {function.__name__}{self._signature}, got {', '.join(unknown)}."
            )

    def __call__(self, *args, **kwargs):
        call = _Call(self._function, self._signature.bind(*args, **kwargs), self._whole, self._axes)
        check_registered("step")  # on every rank, and before the others wait for one of them
        check_hooks()
        try:
            tensors, values, payload = _engine.run_step(self._number, call)
        except BaseException:
            put_back_registered()
            raise
        return call.results(tensors, values, payload)


class _Call:
    """One call of a step function on this rank; the engine asks for what is below on pp_rank 0 only."""

    def __init__(self, function, bound, whole, axes):
        self._function = function
        self._bound = bound
        self._whole = whole
        self._axes = axes
        self._skeleton = None
        self._rows = None  # of the first argument whose microbatches differ in them
        self._returned = []  # by microbatch: (structure, values beside tensors), pickled

    def arguments(self, microbatches, replica, replicas):
        tensors = []
        note_gradient_hooks()
        parts = microbatches * replicas
        first = microbatches * replica

        def leaf_of(position, name):
            axis, is_whole = self._axes.get(name, 0), name in self._whole

            def leaf(value):
                if isinstance(value, torch.Tensor):
                    uneven = replicas == 1 and not is_whole and not torch.is_grad_enabled()
                    rows, pieces = _uneven_pieces(value, axis, microbatches) if uneven else (None, [])
                    self._rows = self._rows or rows
                    tensors.append((value, position, axis, is_whole, pieces))
                    return _TensorAt(len(tensors) - 1)
                if hasattr(value, "smp_slice") and not is_whole:
                    self._has_pieces = True
                    return _Pieces([value.smp_slice(parts, first + m, axis) for m in range(microbatches)])
                if not is_whole:
                    _warn_not_split(value)
                return value

            return leaf

        self._skeleton, self._has_pieces = {}, False
        for position, (name, value) in enumerate(self._bound.arguments.items()):
            if self._bound.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                filled = {key: map_leaves(item, leaf_of(position, key)) for key, item in value.items()}
            else:
                filled = map_leaves(value, leaf_of(position, name))
            self._skeleton[name] = filled
        if self._rows is not None:
            _check_same_rows(
                {value.shape[axis] for value, _, axis, is_whole, _ in tensors if not is_whole and _has_axis(value, axis)}
            )
        return tensors

    def body(self, inputs, microbatch):
        def leaf(value):
            if isinstance(value, _TensorAt):
                return inputs[value.index]
            return value.pieces[microbatch] if isinstance(value, _Pieces) else value

        filled = {name: map_leaves(value, leaf) for name, value in self._skeleton.items()}
        call = inspect.BoundArguments(self._bound.signature, filled)
        DistributedModel._uneven_rows = self._rows
        try:
            with _as_written():
                returned = self._function(*call.args, **call.kwargs)
                check_gradient_hooks()
        except Exception as error:
            _refuse_replaced(put_back_registered())  # what the error says may follow from that
            _refuse_control_flow(error)
            _end_with_the_scripts_line(error.__traceback__)
            raise
        tensors, values = [], []

        def keep(value):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return _TensorAt(len(tensors) - 1)
            values.append(value)
            return _ValueAt(len(values) - 1)

        structure = None if returned is None else map_leaves(returned, keep)
        del self._returned[microbatch:]  # of a run for the plan's sake
        self._returned.append((pickle.dumps(structure), dumps(values, tensors)))
        return tensors

    def differ(self):
        """Objects that cut themselves give each microbatch their own."""
        return self._has_pieces

    def values(self):
        return [values for _, values in self._returned]

    def payload(self):
        DistributedModel._hooked = ()
        _refuse_replaced(put_back_registered())
        structures = [structure for structure, _ in self._returned]
        for microbatch, structure in enumerate(structures):
            if structure != structures[0]:
                raise ValueError(
                    "step: expected the body to return the same containers, keys and kinds of values for every microbatch, got "
                    f"{pickle.loads(structures[0])} for microbatch 0 and {pickle.loads(structure)} for microbatch {microbatch}. "
                    "Return a tensor of zeros where there is nothing to return."
                )
        return pickle.dumps((self._rows, structures[0]))

    def results(self, tensors, values, payload):
        """On every rank."""
        rows, structure = pickle.loads(payload)
        by_microbatch = [loads(each, [tensor[m] for tensor in tensors]) for m, each in enumerate(values)]

        def leaf(value):
            if isinstance(value, _TensorAt):
                output = StepOutput(tensors[value.index])
                output._rows = rows
                return output
            return [each[value.index] for each in by_microbatch] if isinstance(value, _ValueAt) else value

        return map_leaves(pickle.loads(structure), leaf)


def _end_with_the_scripts_line(trace):
    """Where smp's Python refuses a call, by leaving out what torch and smp have called since."""
    frames = []
    while trace is not None:
        frames.append((trace, trace.tb_frame.f_globals.get("__name__", "").partition(".")[0]))
        trace = trace.tb_next
    scripts = [frame for frame, package in frames if package not in ("torch", "smdistributed")]
    if frames[-1][1] == "smdistributed" and scripts:
        scripts[-1].tb_next = None


@contextlib.contextmanager
def _as_written():
    """Runs what torch.compile has compiled, and layers which torch's evaluation computes by one fused operator
    (nn.TransformerEncoderLayer), as they were written: stages that have been cut within them could not run them otherwise."""
    uses_compiler = "torch._dynamo" in sys.modules
    was_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager") if uses_compiler else contextlib.nullcontext():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_enabled)


@dataclasses.dataclass(frozen=True, eq=False)
class _TensorAt:
    """Stands for a tensor of an argument or a result."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class _ValueAt:
    """Stands for anything else in a result."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Pieces:
    """An argument that has cut itself, by microbatch."""

    pieces: list


def _has_axis(tensor, axis):
    return -tensor.dim() <= axis < tensor.dim()


def _uneven_pieces(tensor, axis, microbatches):
    """Of the last batch of an evaluation: (rows of each piece, pieces), the last of which are one shorter. (None, []) where even
    pieces will do."""
    if not _has_axis(tensor, axis) or tensor.shape[axis] % microbatches == 0:
        return None, []
    rows = tensor.shape[axis]
    if rows < microbatches:
        raise ValueError(
            f"step: expected at least one row for each of {microbatches} microbatches, got a tensor of sizes {tuple(tensor.shape)}, "
            f"which is cut along dimension {axis}. Leave the batch out (drop_last), or pad it."
        )
    pieces = list(torch.tensor_split(tensor, microbatches, axis))
    return [piece.shape[axis] for piece in pieces], pieces


def _refuse_replaced(names):
    if names:
        raise NotImplementedError(
            f"step: expected the body to leave the model its parameters and buffers, got others for {', '.join(names)}. "
            "The body runs without data, so what it assigns is lost. Register buffers in the constructor, and write to them "
            "in place: self.mean.copy_(new)."
        )


def _refuse_control_flow(error):
    """torch.cond and its like take functions, for which a graph of operators has no place. What torch says of that depends on
    whether it has loaded its compiler."""
    trace = error.__traceback__
    while trace is not None:
        package, _, operator = trace.tb_frame.f_globals.get("__name__", "").rpartition(".")
        if package == "torch._higher_order_ops" and operator in ("cond", "while_loop", "map", "scan", "associative_scan"):
            raise NotImplementedError(
                f"step: expected operators on tensors, got {operator} of torch, which runs functions by the values of tensors. Compute "
                "both branches and choose by torch.where, write a loop of a fixed length in Python, or call code that needs it through "
                "smp.opaque."
            ) from error
        trace = trace.tb_next


def _check_same_rows(counts):
    if len(counts) > 1:
        raise ValueError(
            "step: expected arguments of as many rows each where microbatches do not divide them, since their pieces would not "
            f"belong together, got {' and '.join(map(str, sorted(counts)))}. Pass what is no batch as non_split_inputs."
        )


_plain = (str, bytes, int, float, bool, complex, type(None), torch.nn.Module, torch.device, torch.dtype)
_warned = set()


def _warn_not_split(value):
    if isinstance(value, torch.utils.data.DataLoader):
        raise ValueError("step: expected batches of a DataLoader, got the DataLoader. Loop over it, and pass what it yields.")
    if isinstance(value, _plain) or type(value) in _warned:
        return
    _warned.add(type(value))
    logs.warning(
        f"Non-splittable object of type {type(value)} passed to smp.step. Every microbatch gets all of it. If it holds tensors "
        "to be split, give its class a method smp_slice(self, num_mb, mb, axis)."
    )
