"""The state of torch.optim's optimizers as files of C++ hold it: kind, groups and fields in the words of LibTorch."""

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.model import model_of
from smdistributed.modelparallel.torch.views import OptimizerView

_COUNT = "step"  # int64 there, a float here
_IN_PYTHON = {"beta1": "betas[0]", "beta2": "betas[1]"}  # as OptimizerView names options
_KINDS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad)


class Twin:
    """What files of C++ hold of an optimizer of one of `models`: the optimizer of LibTorch of its kind, over the same parameters."""

    def __init__(self, optimizer, models):
        self._kind = _kind_of(optimizer, models)
        self._view = OptimizerView(optimizer)
        self._parameters = optimizer._parameters()
        groups = self._view.groups()
        self.made = _engine.LibTorchOptimizer(self._kind.__name__, [each for each, _ in groups], optimizer._engine_optimizer)
        for index, (_, numbers) in enumerate(groups):
            options = self.made.options(index)
            self.made.set_options(index, {option: numbers[_IN_PYTHON.get(option, option)] for option in options})

    def fill(self):
        """With the state of this rank."""
        known = self.made.fields()
        for parameter in self._parameters:
            state = self._view.optimizer.state.get(parameter, {})
            fields = {name: value for name, value in state.items() if value is not None}
            unknown = [name for name in fields if name not in known]
            if unknown:
                raise ValueError(
                    f"expected the state of {self._kind.__name__} to be {', '.join(known)}, got '{unknown[0]}' too, which files of C++ "
                    "do not hold. Use save_checkpoint."
                )
            if _COUNT in fields:
                fields[_COUNT] = torch.tensor(int(fields[_COUNT]))
            if fields:
                self.made.set_state(parameter, fields)

    def loaded(self):
        """What gives the optimizer what has been loaded here. Changes nothing."""
        state = {}
        for name, index in self._view.optimizer.param_name_to_index().items():
            fields = self.made.state(self._parameters[index])
            if fields is not None:
                counts = {_COUNT: _count_of(fields[_COUNT], name)} if _COUNT in fields else {}
                state[index] = {**fields, **counts}
        return lambda: self._load(state)

    def _load(self, state):
        optimizer = self._view.optimizer
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.local_state_dict()["param_groups"]})
        for index in range(len(optimizer.param_groups)):
            options = self.made.options(index)
            self._view.set_options(index, {_IN_PYTHON.get(name, name): value for name, value in options.items()})


def _count_of(value, name):
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32  # as torch.optim counts
    count = value.to(dtype)
    if value < 0 or int(count) != int(value):
        raise ValueError(f"expected a count of updates of '{name}' that {dtype} holds, got {int(value)}.")
    return count


def _kind_of(optimizer, models):
    """The class that it had before it was distributed."""
    if not hasattr(optimizer, "_engine_optimizer"):
        raise TypeError(f"expected what smp.DistributedOptimizer returns, got {type(optimizer).__name__}. Wrap it.")
    kind = type(optimizer).__bases__[-1]
    if kind not in _KINDS:
        raise ValueError(
            f"expected {', '.join(each.__name__ for each in _KINDS)} of torch.optim, which files of C++ hold, got "
            f"{kind.__name__}. Leave optimizer out, and use save_checkpoint for its state."
        )
    if model_of(optimizer._parameters()) not in models:
        raise ValueError("expected an optimizer of the model's parameters, got one of another model.")
    decouples = kind is torch.optim.AdamW
    for group in optimizer.param_groups:
        for option, value in (("maximize", False), ("decoupled_weight_decay", decouples)):
            if group.get(option, value) != value:
                raise ValueError(
                    f"expected {option}={value} of {kind.__name__}, as in LibTorch, got {group[option]}, which C++ would not "
                    "follow. Use save_checkpoint."
                )
    return kind
