"""Models and optimizers as the engine asks about them (smp/engine/model_view.h, smp/engine/optimizer_view.h)."""

import torch


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

    def refusal(self):
        return (
            f"{type(self.optimizer).__name__}: expected an optimizer of a C++ program, got one of Python, whose state is not "
            "gathered from ranks yet. Save what optimizer.state_dict() returns on each rank."
        )

    def erase_state(self, parameter):
        self.optimizer.state.pop(parameter, None)


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
