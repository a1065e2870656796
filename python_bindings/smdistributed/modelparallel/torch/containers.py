"""Walks through the containers that step functions take and return."""

import collections
import collections.abc
import copy

import torch


def map_leaves(value, leaf):
    """A copy of `value` with leaf(each) in place of everything that is no list, tuple, set or mapping; sets of
    plain values are leaves, and sizes.

    Containers keep their class: named tuples, OrderedDict, transformers' ModelOutput. A leaf that is in one place several
    times is asked for several times.
    """
    if isinstance(value, torch.Size):
        return leaf(value)
    if isinstance(value, tuple):
        items = [map_leaves(item, leaf) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    if isinstance(value, list):
        items = [map_leaves(item, leaf) for item in value]
        return items if type(value) is list else _refilled(value, items)
    if isinstance(value, (set, frozenset)):
        if all(isinstance(item, (str, bytes, int, float, complex, type(None))) for item in value):
            return leaf(value)
        return type(value)(map_leaves(item, leaf) for item in value)
    if isinstance(value, collections.abc.Mapping):
        items = {key: map_leaves(item, leaf) for key, item in value.items()}
        if type(value) is dict:
            return items
        if not isinstance(value, (dict, collections.UserDict)):
            return type(value)(items)
        copied = copy.copy(value)
        for key, item in items.items():
            copied[key] = item
        return copied
    return leaf(value)


def _refilled(value, items):
    copied = copy.copy(value)
    copied[:] = items
    return copied
