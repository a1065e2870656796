"""torch.nn.utils.clip_grad_norm_ for models whose gradients are spread over ranks."""

import math

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.model import all_models

_torchs = torch.nn.utils.clip_grad_norm_


def clip_grad_norm_(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False, foreach=None):
    """Given the parameters of a DistributedModel on several stages, clips by the norm of all ranks; collective over the
    pipeline then. Any others, and those of local_parameters(), are clipped by torch's."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    model = _spread_over_stages(parameters)
    if model is None:
        return _torchs(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = model.clip_grad_norm_(max_norm, float(norm_type))
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(
            f"clip_grad_norm_: expected a finite norm of order {norm_type} of the gradients, got {norm}. The optimizer's step "
            "names the loss or gradient that it comes from; error_if_nonfinite=False leaves it to that."
        )
    return torch.tensor(norm)


def replace_torchs():
    """What has imported torch's function by its name before goes on with that."""
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_ = clip_grad_norm_


def _spread_over_stages(parameters):
    """The model that these are the trainable parameters of; None where torch's function sees all that it is to see."""
    given = {id(parameter) for parameter in parameters}
    for model in all_models():
        own = {id(parameter) for parameter in model.parameters()}
        if given.isdisjoint(own) or not model.partitioned or _engine.pp_size() == 1:
            continue
        trainable = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        if trainable <= given <= own:
            return model
        if not given <= {id(parameter) for parameter in model.local_parameters()}:
            raise ValueError(
                f"clip_grad_norm_: expected all {len(trainable)} trainable parameters of a model that is spread over ranks, "
                f"got {len(given & trainable)} of them and {len(given - own)} others, whose norm no rank could know. Pass "
                "model.parameters(), or model.local_parameters() to clip those of each rank by themselves."
            )
    return None
