"""Values that a body returns beside tensors, on their way to the other ranks."""

import io
import pickle

import torch


class _Pickler(pickle.Pickler):
    """Tensors within, as those of transformers' caches, are added to `tensors` in place of their data."""

    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors
        self._positions = {}

    def persistent_id(self, value):
        if not isinstance(value, torch.Tensor):
            return None
        if id(value) not in self._positions:
            self._positions[id(value)] = len(self._tensors)
            self._tensors.append(value)
        return self._positions[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file, tensors):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, position):
        return self._tensors[position]


def dumps(values, tensors):
    file = io.BytesIO()
    _Pickler(file, tensors).dump(values)
    return file.getvalue()


def loads(data, tensors):
    return _Unpickler(io.BytesIO(data), tensors).load()
