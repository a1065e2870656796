"""numpy's arrays and scalars in checkpoint files, made of their bytes alone.

numpy's own constructors trust what they are given: a type of Python objects over bytes of a file makes pointers of them. So while
a file is read, their names stand for the classes here, and what these hold becomes numpy's when all has been read.
"""

import math
import pickle
import re

import numpy
import torch

from smdistributed.modelparallel.torch import objects

_NUMBERS = re.compile(r"b1|[iu][1248]|f[248]|f16|c8|c16|c32")


class _Type:
    """numpy.dtype, of numbers."""

    def __init__(self, code, align=False, copy=True):
        del align, copy
        if not isinstance(code, str) or not _NUMBERS.fullmatch(code):
            raise pickle.UnpicklingError(f"expected numpy's numbers in a file, got a dtype {code!r}")
        self.made = numpy.dtype(code)

    def __setstate__(self, state):
        order, rest = state[1], (*state[:1], *state[2:])
        if order not in ("<", ">", "|", "=") or rest != (3, None, None, None, -1, -1, 0):
            raise pickle.UnpicklingError(f"expected the state of a plain dtype, got {state!r}")
        self.made = self.made.newbyteorder(order)


class _Array:
    """numpy.ndarray."""

    __hash__ = None  # as its own

    def __setstate__(self, state):
        _, shape, of, is_fortran, data = state
        self.made = _array(shape, of, data, "F" if is_fortran else "C")


def _array(shape, of, data, order="C"):
    if not isinstance(of, _Type) or not isinstance(data, bytes):
        raise pickle.UnpicklingError(f"expected an array of numbers and bytes, got {type(of).__name__} and {type(data).__name__}")
    if not isinstance(of.made, numpy.dtype) or of.made.hasobject:
        raise pickle.UnpicklingError("expected an array of numbers, got another dtype")
    if len(data) != of.made.itemsize * math.prod(shape):
        raise pickle.UnpicklingError(f"expected the bytes of an array of shape {shape}, got {len(data)}")
    return numpy.ndarray(shape, of.made, data, order=order).copy("K")


def _reconstruct(kind, shape, code):
    del kind, shape, code  # of an empty array, which a state follows
    return _Array()


def _scalar(of, data):
    return _array((), of, data)[()]


def _no_bytes():
    return b""  # which pickle writes as a call of bytes


def standing_in():
    """For torch.serialization.safe_globals."""
    stands = [*objects.NAMESPACES, (_Type, "numpy.dtype"), (_Array, "numpy.ndarray"), (_no_bytes, "builtins.bytes"), (_no_bytes, "__builtin__.bytes")]
    for core in ("core", "_core"):
        stands += [(_reconstruct, f"numpy.{core}.multiarray._reconstruct"), (_scalar, f"numpy.{core}.multiarray.scalar")]
    return stands


def made(value, seen):
    """`value`, in whose containers numpy's own, and objects, have taken their places. `seen`: a dict, empty at first."""
    if isinstance(value, (_Type, _Array)):
        if not hasattr(value, "made"):
            raise pickle.UnpicklingError("expected the state of an array, got none")
        return value.made
    if isinstance(value, objects.Object):
        if id(value) not in seen:
            seen[id(value)] = value, value.made  # which its fields may lead to again
            objects.fields_of(value.made).update({name: made(each, seen) for name, each in value.fields.items()})
        return value.made
    if not isinstance(value, (dict, list, tuple, torch.Tensor)):
        return value
    if id(value) not in seen:
        seen[id(value)] = value, value  # kept, so that nothing else gets its id
        seen[id(value)] = value, _filled(value, seen)
    return seen[id(value)][1]


def _filled(value, seen):
    if isinstance(value, tuple):
        parts = tuple(made(each, seen) for each in value)
        return value if all(part is each for part, each in zip(parts, value, strict=True)) else parts
    places = enumerate(value) if isinstance(value, list) else list(value.items()) if isinstance(value, dict) else ()
    for place, each in places:
        value[place] = made(each, seen)
    attributes = getattr(value, "__dict__", {})
    for name, each in attributes.items():
        attributes[name] = made(each, seen)
    return value
