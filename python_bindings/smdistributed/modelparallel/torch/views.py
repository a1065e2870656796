"""Models and optimizers as the engine asks about them (smp/engine/model_view.h, smp/engine/optimizer_view.h)."""

import pickle

import torch

_OTHERS = "beside tensors"  # a field of bytes


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

    def is_elementwise(self):
        """Whether it is torch's own, of which only LBFGS looks at several parameters at once."""
        kind = type(self.optimizer)
        return getattr(torch.optim, kind.__name__, None) is kind and kind is not torch.optim.LBFGS

    def tensors_kept_for(self, parameter):
        state = getattr(self.optimizer, "state", {}).get(parameter)
        return [value for value in state.values() if isinstance(value, torch.Tensor)] if isinstance(state, dict) else []

    def snapshot(self):
        """What puts back its attributes, its state and its groups, and those of an optimizer within; not what is in tensors."""
        kept = _containers_in(getattr(self.optimizer, "__dict__", {}), {})

        def put_back():
            for container, items in kept.values():
                container.clear()
                (container.update if isinstance(container, dict) else container.extend)(items)

        return put_back

    def has_state(self):
        return isinstance(self.optimizer, torch.optim.Optimizer)

    def kind(self):
        return type(self.optimizer).__name__

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
        """None if the parameter was never updated."""
        state = self.optimizer.state.get(parameter)
        return fields_of(state) if state else None

    def set_state(self, parameter, fields):
        self.optimizer.state[parameter] = state_of(fields, parameter.device)

    def erase_state(self, parameter):
        getattr(self.optimizer, "state", {}).pop(parameter, None)


def _containers_in(value, found):
    """Dictionaries and lists, with copies of what is in them, by identity."""
    if isinstance(value, torch.optim.Optimizer):
        value = vars(value)
    if isinstance(value, (dict, list)) and id(value) not in found:
        found[id(value)] = value, value.copy()
        for each in value.values() if isinstance(value, dict) else value:
            _containers_in(each, found)
    return found


def fields_of(state):
    """What torch.optim keeps for a parameter as tensors by name, and in one of bytes all else, with the names in their order."""
    if not isinstance(state, dict):  # of a class of the user's
        return {_OTHERS: _bytes_of(state)}
    fields = {name: value for name, value in state.items() if _is_field(name, value)}
    others = {name: None if name in fields else value for name, value in state.items()}
    return {**fields, _OTHERS: _bytes_of(others)}


def state_of(fields, device):
    """The state that fields_of has taken apart, in another process of this job perhaps."""
    state = pickle.loads(fields.pop(_OTHERS).numpy().tobytes())
    if not isinstance(state, dict):
        return state
    return {**state, **{name: value if name == "step" else value.to(device) for name, value in fields.items()}}


def _bytes_of(values):
    return torch.frombuffer(bytearray(pickle.dumps(values)), dtype=torch.uint8)


def _is_field(name, value):
    """Whether it travels as a tensor: dense, with data, under a name that the engine's texts can hold."""
    is_dense = type(value) is torch.Tensor and value.layout == torch.strided and not value.is_quantized and not value.is_meta
    return isinstance(name, str) and name.isprintable() and name != _OTHERS and is_dense and not value.requires_grad


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
