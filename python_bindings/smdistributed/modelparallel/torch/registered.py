"""What modules have registered: parameters, buffers and submodules, as they were at one time against what is there now, and the memory of their
tensors."""

import operator

import torch
from torch.nn.parameter import is_lazy

from smdistributed.modelparallel.torch.views import ModelView


def registered_in(module):
    """(path, the dictionary of a module, what that has now), three of each module."""
    return [
        (path, registered, dict(registered.items()))
        for path, each in module.named_modules()
        for registered in (each._parameters, each._buffers, each._modules)
    ]


def changed_in(rows):
    """Of what registered_in() returned earlier: ({name: (what was there, what is there now)}, the dictionary, what that had)."""
    for path, registered, before in rows:
        if not registered and not before:
            continue  # as most
        now = registered if isinstance(registered, dict) else dict(registered.items())  # that of TorchScript is none
        if now.keys() == before.keys() and all(map(operator.is_, map(now.get, before), before.values())):
            continue
        prefix = f"{path}." if path else ""
        names = [name for name in {**before, **now} if now.get(name) is not before.get(name)]
        yield {prefix + name: (before.get(name), now.get(name)) for name in names}, registered, before


def put_back(registered, before):
    if isinstance(registered, dict):
        registered.clear()  # which keeps their order
        registered.update(before)
    else:  # of TorchScript, where none comes or goes
        for name, value in before.items():
            registered[name] = value


class SharedMemory:
    """Which tensors of a module share memory. The first step puts those on the same ranks; later it is too late for that."""

    def __init__(self, module):
        tensors = {id(tensor): (name, tensor) for name, tensor, *_ in ModelView(module).tensors()}
        self._tensors = [each for each in tensors.values() if torch._C._has_storage(each[1]) and not is_lazy(each[1])]
        self._storages = []
        self._first_of = {}  # by name: the first tensor on its memory

    def shared_since(self, is_spread):
        """Names of tensors on memory that they did not share when the model was spread, and of what else is there."""
        storages = [tensor.untyped_storage()._cdata for _, tensor in self._tensors]
        if storages == self._storages:
            return []  # nothing has moved, as before most steps
        first_of = self._find_first()
        if is_spread:
            names = [name for name, first in first_of.items() if self._first_of[name] != self._first_of[first]]
            if names:
                return sorted({first_of[name] for name in names}.union(names))
        else:
            self._first_of = first_of
        self._storages = storages
        return []

    def _find_first(self):
        places = [(tensor.untyped_storage()._cdata, *_extent(tensor), name) for name, tensor in self._tensors if tensor.numel() > 0]
        first_of = {name: name for name, _ in self._tensors}
        here, limit, first = None, 0, None
        for storage, begin, end, name in sorted(places):
            if storage != here or begin >= limit:
                here, limit, first = storage, end, name
            first_of[name], limit = first, max(limit, end)
        return first_of


def _extent(tensor):
    """Of its elements on their storage, in bytes."""
    begin = tensor.storage_offset()
    end = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return begin * tensor.element_size(), end * tensor.element_size()
