"""Models and optimizers as the engine asks about them (smp/engine/model_view.h, smp/engine/optimizer_view.h)."""

import pickle

import torch

_OTHERS = "beside tensors"


class ModelView:
    def __init__(self, module):
        self.module = module

    def tensors(self):
        """(name, tensor, is_buffer, is_persistent): parameters, then buffers, under every name that they have."""
        found = [(name, p, False, True) for name, p in self.module.named_parameters(remove_duplicate=False)]
        transient = {
            f"{path}.{name}" if path else name
            for path, module in self.module.named_modules(remove_duplicate=False)
            for name in module._non_persistent_buffers_set
        }
        for name, buffer in self.module.named_buffers(remove_duplicate=False):
            found.append((name, buffer, True, name not in transient))
        return found

    def module_paths(self):
        return [path for path, _ in self.module.named_modules(remove_duplicate=False)]

    def is_training(self):
        return self.module.training


class OptimizerView:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def memory(self):
        """State, and workspace of an update, in units of the parameters."""
        return max((_state_of(self.optimizer, group), 1.0) for group in self.optimizer.param_groups)

    def groups(self):
        """(parameters, options that are numbers): ranks compare them, since each updates a part by its own."""
        return [(list(group["params"]), _numbers_of(group)) for group in self.optimizer.param_groups]

    def kind(self):
        return type(self.optimizer).__name__ if isinstance(self.optimizer, torch.optim.Optimizer) else ""

    def set_options(self, index, numbers):
        """What groups() gives of a group, of another replica."""
        group = self.optimizer.param_groups[index]
        for name, value in group.items():
            if isinstance(value, tuple):
                items = enumerate(value)
                group[name] = tuple(_as(each, numbers.get(f"{name}[{i}]")) for i, each in items)
            else:
                group[name] = _as(value, numbers.get(name))

    def state(self, parameter):
        """Tensors by name, and in one of bytes what is not a tensor; None if the parameter was never updated."""
        state = getattr(self.optimizer, "state", {}).get(parameter)
        if not state:
            return None
        fields = {name: value.detach() for name, value in state.items() if _is_field(name, value)}
        others = {name: value for name, value in state.items() if name not in fields}
        return {**fields, _OTHERS: torch.frombuffer(bytearray(pickle.dumps(others)), dtype=torch.uint8)}

    def set_state(self, parameter, fields):
        others = pickle.loads(fields.pop(_OTHERS).numpy().tobytes())  # of another process of this job
        on_device = {name: value if name == "step" else value.to(parameter.device) for name, value in fields.items()}
        self.optimizer.state[parameter] = {**on_device, **others}

    def erase_state(self, parameter):
        getattr(self.optimizer, "state", {}).pop(parameter, None)


def _is_field(name, value):
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout == torch.strided


def _as(value, number):
    """`number` in place of an option, of its type."""
    if number is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.fill_(number)
    is_whole = isinstance(value, bool) or number.is_integer()  # lr=1 may have become 0.5
    return type(value)(number) if is_whole else number


def _numbers_of(group):
    numbers = {}
    for name, value in group.items():
        for index, each in enumerate(value if isinstance(value, tuple) else [value]):
            if isinstance(each, (bool, int, float)) or (isinstance(each, torch.Tensor) and each.numel() == 1):
                numbers[f"{name}[{index}]" if isinstance(value, tuple) else name] = float(each)
    return numbers


def _state_of(optimizer, group):
    if isinstance(optimizer, torch.optim.SGD):
        return 1.0 if group["momentum"] else 0.0
    return 3.0 if group.get("amsgrad") else 2.0
