"""The step function: a loop body written for one batch, run as a pipeline of microbatches."""

import dataclasses
import inspect
import pickle
import warnings

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.containers import map_leaves


class StepOutput:
    """One tensor per microbatch, the same on every rank; detached, and the caller's own."""

    def __init__(self, outputs):
        self.outputs = list(outputs)

    def reduce_mean(self):
        """Mean over microbatches, of the shape of one."""
        return torch.stack(self.outputs).mean(0)

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


def step(function=None, *, non_split_inputs=(), input_split_axes=None, detach_outputs=True):
    """Turns a function into a step function, with or without options.

    non_split_inputs: names of arguments that every microbatch gets whole. input_split_axes: by name, the dimension along which
    an argument is cut; 0 for the others. Results are always detached: they exist on ranks that have no graph of them.
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
        tensors, values, payload = _engine.run_step(self._number, call)
        return call.results(tensors, values, payload)


class _Call:
    """One call of a step function on this rank; the engine asks for what is below on pp_rank 0 only."""

    def __init__(self, function, bound, whole, axes):
        self._function = function
        self._bound = bound
        self._whole = whole
        self._axes = axes
        self._skeleton = None
        self._returned = []  # by microbatch: (structure, values beside tensors), pickled

    def arguments(self, microbatches, replica, replicas):
        tensors = []
        parts = microbatches * replicas
        first = microbatches * replica

        def leaf_of(position, name):
            axis, is_whole = self._axes.get(name, 0), name in self._whole

            def leaf(value):
                if isinstance(value, torch.Tensor):
                    tensors.append((value, position, axis, is_whole, []))
                    return _TensorAt(len(tensors) - 1)
                if hasattr(value, "smp_slice") and not is_whole:
                    return _Pieces([value.smp_slice(parts, first + m, axis) for m in range(microbatches)])
                if not is_whole:
                    _warn_not_split(value)
                return value

            return leaf

        named = {}
        for position, (name, value) in enumerate(self._named_arguments()):
            named[name] = map_leaves(value, leaf_of(position, name))
        self._skeleton = named
        return tensors

    def body(self, inputs, microbatch):
        def leaf(value):
            if isinstance(value, _TensorAt):
                return inputs[value.index]
            return value.pieces[microbatch] if isinstance(value, _Pieces) else value

        filled = {name: map_leaves(value, leaf) for name, value in self._skeleton.items()}
        returned = self._function(*self._positional(filled), **self._keywords(filled))
        tensors, values = [], []

        def keep(value):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                return _TensorAt(len(tensors) - 1)
            values.append(value)
            return _ValueAt(len(values) - 1)

        structure = None if returned is None else map_leaves(returned, keep)
        self._returned.append((pickle.dumps(structure), pickle.dumps(values)))
        return tensors

    def values(self):
        return [values for _, values in self._returned]

    def payload(self):
        structures = [structure for structure, _ in self._returned]
        for microbatch, structure in enumerate(structures):
            if structure != structures[0]:
                raise ValueError(
                    "step: expected the body to return the same containers, keys and kinds of values for every microbatch, got "
                    f"{pickle.loads(structures[0])} for microbatch 0 and {pickle.loads(structure)} for microbatch {microbatch}. "
                    "Return a tensor of zeros where there is nothing to return."
                )
        return structures[0]

    def results(self, tensors, values, payload):
        """On every rank."""
        by_microbatch = [pickle.loads(each) for each in values]

        def leaf(value):
            if isinstance(value, _TensorAt):
                return StepOutput(tensors[value.index])
            return [each[value.index] for each in by_microbatch] if isinstance(value, _ValueAt) else value

        return map_leaves(pickle.loads(payload), leaf)

    def _named_arguments(self):
        """(name, value); those of *args have the name of the whole, those of **kwargs their own."""
        for name, value in self._bound.arguments.items():
            kind = self._bound.signature.parameters[name].kind
            if kind is inspect.Parameter.VAR_KEYWORD:
                yield from value.items()
            else:
                yield name, value

    def _positional(self, filled):
        for name, parameter in self._bound.signature.parameters.items():
            if name not in self._bound.arguments:
                continue
            if parameter.kind is parameter.VAR_POSITIONAL:
                yield from filled[name]
            elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                yield filled[name]

    def _keywords(self, filled):
        parameters = self._bound.signature.parameters
        positional = {name for name, p in parameters.items() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)}
        return {name: value for name, value in filled.items() if name not in positional}


@dataclasses.dataclass
class _TensorAt:
    """Stands for a tensor of an argument or a result."""

    index: int


@dataclasses.dataclass
class _ValueAt:
    """Stands for anything else in a result."""

    index: int


@dataclasses.dataclass
class _Pieces:
    """An argument that has cut itself, by microbatch."""

    pieces: list


_plain = (str, bytes, int, float, bool, complex, type(None), torch.nn.Module, torch.device, torch.dtype)
_warned = set()


def _warn_not_split(value):
    if isinstance(value, _plain) or type(value) in _warned:
        return
    _warned.add(type(value))
    warnings.warn(
        f"Non-splittable object of type {type(value)} passed to smp.step. Every microbatch gets all of it. If it holds tensors "
        "to be split, give its class a method smp_slice(self, num_mb, mb, axis).",
        stacklevel=4,
    )
