"""The state of torch.optim's optimizers as files of C++ hold it: kind, groups and fields in the words of LibTorch."""

import torch

from smdistributed.modelparallel.torch.agreement import agreed
from smdistributed.modelparallel.torch.comm import gathered
from smdistributed.modelparallel.torch.model import model_of
from smdistributed.modelparallel.torch.views import OptimizerView

_COUNT = "step"  # int64 there, a float here; the other fields have shape and type of their parameter
_IN_PYTHON = {"beta1": "betas[0]", "beta2": "betas[1]"}  # as OptimizerView names options

_ADAM = (
    ("lr", "beta1", "beta2", "eps", "weight_decay", "amsgrad"),
    {_COUNT: None, "exp_avg": None, "exp_avg_sq": None, "max_exp_avg_sq": "amsgrad"},
)
# Options, and fields with the option that makes a step need them, unless that is 0; without one it always does.
_KINDS = {
    torch.optim.SGD: (("lr", "momentum", "dampening", "weight_decay", "nesterov"), {"momentum_buffer": "momentum"}),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.RMSprop: (
        ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
        {_COUNT: None, "square_avg": None, "momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    torch.optim.Adagrad: (
        ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"), {"sum": None, _COUNT: None},
    ),
}  # fmt: skip


def of(optimizer, model):
    """kind, [(options, names)], {name: fields} of this rank, for _engine.save_state."""
    kind = _kind_of(optimizer, model)
    options, known = _KINDS[kind]
    names = {}  # the first of each: it is the parameter's own, where several modules share it
    for name, parameter in model.get_module().named_parameters():
        names[id(parameter)] = name
    groups = [
        ({option: numbers[_IN_PYTHON.get(option, option)] for option in options}, [names[id(each)] for each in parameters])
        for parameters, numbers in OptimizerView(optimizer).groups()
    ]
    local = optimizer.local_state_dict()["state"]
    entries = {}
    for index, parameter in enumerate(optimizer._parameters()):
        fields = {field: value for field, value in local.get(index, {}).items() if value is not None}
        unknown = [field for field in fields if field not in known]
        if unknown:
            raise ValueError(
                f"expected the state of {kind.__name__} to be {', '.join(known)}, got '{unknown[0]}' too, which files of C++ "
                "do not hold. Use save_checkpoint."
            )
        if _COUNT in fields:
            fields[_COUNT] = torch.tensor(int(fields[_COUNT]))
        entries[names[id(parameter)]] = fields
    return kind.__name__, groups, entries


def loading(optimizer, model, kind, groups, entries):
    """What loads into the optimizer what _engine.load_state has read on each rank, when it is called. Collective over all ranks;
    changes nothing, and raises on all."""
    caller = "load_state"
    own = agreed(caller, lambda: _kind_of(optimizer, model))
    read = [each for each in gathered(caller, (kind, groups)) if each[0]]  # some ranks may have read no file
    if not read:
        raise ValueError(f"{caller}: expected the state of an optimizer, got a save without. Leave optimizer out.")
    if any(each != read[0] for each in read):
        raise ValueError(f"{caller}: expected the same optimizer in all files, got {read[0][0]} with other groups in some.")
    kind, groups = read[0]
    parameters = optimizer._parameters()
    indices = {id(parameter): index for index, parameter in enumerate(parameters)}
    names = {  # each that a shared parameter has
        name: indices[id(parameter)]
        for name, parameter in model.get_module().named_parameters(remove_duplicate=False)
        if id(parameter) in indices
    }

    def checked():
        _check_groups(optimizer, own, kind, groups, names)
        options = [numbers for numbers, group in groups for _ in group]
        unknown = [name for name in entries if name not in names]
        if unknown:
            raise ValueError(f"expected the state of the optimizer's parameters, got that of '{unknown[0]}'.")
        return {
            names[name]: _checked(own, name, parameters[names[name]], fields, options[names[name]])
            for name, fields in entries.items()
        }

    part = agreed(caller, checked)
    state = {}
    for index in range(len(parameters)):  # one at a time: all may be more than a message can be
        for each in gathered(caller, part.get(index)):
            if each is not None:
                state[index] = each
    if own is torch.optim.Adagrad and len(state) < len(parameters):  # made with it, and not by a step
        raise ValueError(
            f"{caller}: expected the state of all {len(parameters)} parameters, as Adagrad has it, got that of {len(state)}."
        )

    def load():
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.local_state_dict()["param_groups"]})
        for index, (numbers, _) in enumerate(groups):
            OptimizerView(optimizer).set_options(index, {_IN_PYTHON.get(name, name): value for name, value in numbers.items()})

    return load


def _kind_of(optimizer, model):
    """The class that it had before it was distributed."""
    if not hasattr(optimizer, "_engine_optimizer"):
        raise TypeError(f"expected what smp.DistributedOptimizer returns, got {type(optimizer).__name__}. Wrap it.")
    kind = type(optimizer).__bases__[-1]
    if kind not in _KINDS:
        raise ValueError(
            f"expected {', '.join(each.__name__ for each in _KINDS)} of torch.optim, which files of C++ hold, got "
            f"{kind.__name__}. Leave optimizer out, and use save_checkpoint for its state."
        )
    if model_of(optimizer._parameters()) is not model:
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


def _check_groups(optimizer, own, kind, groups, names):
    if kind != own.__name__:
        raise ValueError(f"expected the state of {own.__name__}, got that of {kind}. Make the optimizer that was saved.")
    index, wanted = 0, []
    for group in optimizer.param_groups:
        wanted.append([*range(index, index + len(group["params"]))])
        index += len(group["params"])
    given = [[names.get(name) for name in group] for _, group in groups]
    if given != wanted or any(set(options) != set(_KINDS[own][0]) for options, _ in groups):
        raise ValueError(
            f"expected the parameters and options of {len(wanted)} groups of {own.__name__}, got others in {len(given)}. Make "
            "the optimizer over the same parameters, in the same order."
        )


def _checked(kind, name, parameter, fields, options):
    """The fields of one parameter as torch.optim has them."""
    known = _KINDS[kind][1]
    needed = {field for field, option in known.items() if option is None or options[option] != 0}
    if not needed <= set(fields) <= set(known):
        raise ValueError(
            f"expected {', '.join(sorted(needed)) or 'no state'} of '{name}' for {kind.__name__}, got "
            f"{', '.join(sorted(fields))}. Take a save of the same optimizer."
        )
    state = {}
    for field, value in fields.items():
        dtype, shape = (torch.int64, ()) if field == _COUNT else (parameter.dtype, tuple(parameter.shape))
        if (value.dtype, tuple(value.shape)) != (dtype, shape):
            raise ValueError(
                f"expected {field} of '{name}' to be {dtype} of shape {shape}, got {value.dtype} of {tuple(value.shape)}."
            )
        state[field] = _count_of(value, name) if field == _COUNT else value
    return state


def _count_of(value, name):
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32  # as torch.optim counts
    count = value.to(dtype)
    if value < 0 or int(count) != int(value):
        raise ValueError(f"expected a count of updates of '{name}' that {dtype} holds, got {int(value)}.")
    return count
