"""torch.nn.utils.clip_grad_norm_ for models whose gradients are spread over ranks."""

import functools
import math

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.model import all_models

_torchs = torch.nn.utils.clip_grad_norm_.__wrapped__  # without the no_grad that torch has around it


def _clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """Given the parameters of a DistributedModel on several stages, clips by the norm of all ranks; collective over the
    pipeline then. Any others are clipped by torch's."""
    spread = [model for model in all_models() if model.partitioned and _engine.pp_size() > 1]
    if not spread:
        return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model = _owner(parameters, spread)
    if model is None:
        return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if error_if_nonfinite and not math.isfinite(norm := model.clip_grad_norm_(math.inf, float(norm_type))):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite norm of order {norm_type} of the gradients, got {norm}. The optimizer's step "
            "names the loss or gradient that it comes from; error_if_nonfinite=False leaves it to that."
        )
    norm = model.clip_grad_norm_(max_norm, float(norm_type))
    return torch.tensor(norm, dtype=functools.reduce(torch.promote_types, {parameter.dtype for parameter in parameters}))


def replace_torchs():
    """Within torch's function, so that what has imported it by its name before calls this one too."""
    (function,) = torch.nn.utils.clip_grad_norm_.__closure__
    function.cell_contents = _clip_grad_norm_


def _owner(parameters, spread):
    """The model that these are the trainable parameters of; None where torch's function sees all that it is to see."""
    given = {id(parameter) for parameter in parameters}
    for model in spread:
        own = {id(parameter) for parameter in model.parameters()}
        is_share = not given and all(parameter.grad is None for parameter in model.parameters())  # of a rank without gradients
        if given.isdisjoint(own) and not is_share:
            continue
        trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if trainable <= given <= own:
            return model
        raise ValueError(
            f"clip_grad_norm_: expected all {len(trainable)} trainable parameters of a model that is spread over ranks, "
            f"got {len(given & trainable)} of them and {len(given - own)} others, whose norm no rank could know. Pass "
            "model.parameters(), with those that have no gradient on this rank. To clip a rank's share by itself: "
            "clip_grads_with_norm_ and get_total_norm of torch.nn.utils."
        )
    return None
