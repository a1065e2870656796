"""State dictionaries of a model: whole ones, which a plain module takes too, and parts, by rank."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA_STATE
from torch.nn.modules.module import _IncompatibleKeys

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.agreement import agreed
from smdistributed.modelparallel.torch.comm import gathered
from smdistributed.modelparallel.torch.views import ModelView

PARTIAL = "_smp_is_partial"
_STEPS = "smp_steps"  # dropout draws by them; they stand beside the version that torch notes for the module itself


def whole(module, tensors, steps):
    """In the module's order, and with what it has beside tensors of the model."""
    tensors, state = dict(tensors), module.state_dict(keep_vars=True)
    for name in state:
        state[name] = tensors.get(name, state[name])
    return _with_steps(state, steps)


def part(module, tensors, steps):
    """What is beside tensors, such as get_extra_state(), is that of pp_rank() 0: the body runs there."""
    tensors, state = dict(tensors), module.state_dict(keep_vars=True)
    of_model = {name for name, *_ in ModelView(module).tensors()}
    for name in list(state):
        if name in tensors:
            state[name] = tensors[name]
        elif name in of_model or _engine.pp_rank() != 0:
            del state[name]
    state[PARTIAL] = True
    return _with_steps(state, steps)


def _with_steps(state, steps):
    if not hasattr(state, "_metadata"):  # of a module that makes its own
        state = OrderedDict(state)
        state._metadata = OrderedDict()
    state._metadata.setdefault("", {})[_STEPS] = tuple(steps)
    return state


def _steps_of(state):
    steps = getattr(state, "_metadata", {}).get("", {}).get(_STEPS)
    if steps is not None and not (len(steps) == 2 and all(type(each) is int and each >= 0 for each in steps)):
        raise ValueError(f"expected counts of steps in the dictionary's metadata, got {steps!r}.")
    return steps


def load(model, state, strict, check):
    own = model.get_module().state_dict(keep_vars=True)

    def split():
        check()
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a state dictionary, got {type(state).__name__}.")
        others = {name: value for name, value in state.items() if name.endswith(_EXTRA_STATE)}
        tensors = {name: value for name, value in state.items() if name not in others and name != PARTIAL}
        for name, value in tensors.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"expected tensors, got {type(value).__name__} for '{name}'. Pass a state_dict().")
        return tensors, others, _steps_of(state)

    tensors, others, steps = agreed("load_state_dict", split)
    passed, extra = set(), {}
    for dp_rank, names, values in gathered("load_state_dict", (_engine.dp_rank(), list(tensors), others)):
        if dp_rank == 0:
            passed.update(names)
            extra.update(values)
    missing = [name for name in own if name not in passed and name not in extra]
    unexpected = sorted(passed.union(extra).difference(own))
    wrong = [name for name in missing + unexpected if name.endswith(_EXTRA_STATE)]
    if strict and wrong:
        raise ValueError(
            "load_state_dict: expected the extra state that the model's modules have, got missing or unexpected "
            f"{', '.join(wrong)}. Load the state of the same model, or pass strict=False to load what fits."
        )
    _engine.load_state_dict(model._engine_model, list(tensors.items()), steps, strict)
    for name, value in extra.items():
        if name in own:
            model.get_module().get_submodule(name.removesuffix(_EXTRA_STATE).removesuffix(".")).set_extra_state(value)
    return _IncompatibleKeys(missing, unexpected)


def with_tied(module, state):
    """With what files of safetensors hold once under the other names that it has in `module`."""
    names = {}
    for name, tensor, _, is_persistent in ModelView(module).tensors():
        if is_persistent:
            names.setdefault(id(tensor), []).append(name)
    for group in names.values():
        held = next((name for name in group if name in state), None)
        if held is not None:
            for name in group:
                state.setdefault(name, state[held])
    return state
