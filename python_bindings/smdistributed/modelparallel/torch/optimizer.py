"""DistributedOptimizer: the optimizer itself, which updates on each rank what lives there."""

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.comm import CommGroup, allgather
from smdistributed.modelparallel.torch.model import model_of
from smdistributed.modelparallel.torch.views import OptimizerView


def DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, **dynamic_loss_args):  # noqa: N802
    """Returns `optimizer`, whose class now derives from its own: schedulers and isinstance see what they saw before.

    The optimizer has to update each parameter by its own gradient. Loss scales are accepted, without effect, for float32.
    """
    del dynamic_loss_args
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    is_scaled = dynamic_loss_scale or static_loss_scale not in (None, 1.0)
    if is_scaled and any(parameter.dtype == torch.float16 for parameter in parameters):
        raise NotImplementedError(
            "DistributedOptimizer: expected float32 parameters where a loss scale is asked for, got float16 ones, for which there "
            "is no scaling yet. Train in float32, or under torch.autocast with bfloat16."
        )
    model = model_of(parameters)
    own = type(optimizer)
    optimizer._engine_optimizer = _engine.add_optimizer(OptimizerView(optimizer), model._engine_model)
    patched = vars(optimizer).pop("step", None)  # by a scheduler that was made before, around the step of the class
    optimizer.__class__ = type(own.__name__, (_Distributed, own), {})
    if patched is not None:
        optimizer.step = _as_schedulers_patch(optimizer)
    return optimizer


def _as_schedulers_patch(optimizer):
    step = optimizer.step

    def patched(*args, **kwargs):
        optimizer._opt_called = True
        return step(*args, **kwargs)

    patched._wrapped_by_lr_sched = True
    return patched


class _Distributed:
    """What is different about an optimizer whose parameters are spread over ranks."""

    def step(self, closure=None):
        if closure is not None:
            raise ValueError(
                "step: expected no closure, got one. It would run the model outside of a step function; call that first."
            )
        if _engine.begin_update(self._engine_optimizer):
            super().step()

    def state_dict(self):
        """With the state of all parameters. Collective over the pipeline."""
        self._keep_local_state()
        gathered = super().state_dict()
        state = {}
        for part in allgather(gathered["state"], CommGroup.PP_GROUP):
            state.update(part)
        gathered["state"] = dict(sorted(state.items()))
        return gathered

    def local_state_dict(self):
        """With the state of the parameters on this rank."""
        return super().state_dict()

    def load_state_dict(self, state_dict):
        """Of all parameters; this rank keeps the state of its own."""
        super().load_state_dict(state_dict)
        self._keep_local_state()

    def _keep_local_state(self):
        model = model_of(self._parameters())
        if not model.partitioned:
            return  # the first update after the first step does it
        local = {id(parameter) for parameter in model.local_parameters()}
        for parameter in self._parameters():
            if id(parameter) not in local:
                self.state.pop(parameter, None)

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]
