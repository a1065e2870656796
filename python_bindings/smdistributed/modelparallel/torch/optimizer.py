"""DistributedOptimizer: the optimizer itself, which updates on each rank what lives there."""

import weakref

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import state_mod
from smdistributed.modelparallel.torch.comm import CommGroup, allgather
from smdistributed.modelparallel.torch.model import model_of
from smdistributed.modelparallel.torch.views import OptimizerView


def DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, **dynamic_loss_args):  # noqa: N802
    """Returns `optimizer`, whose class now derives from its own: schedulers and isinstance see what they saw before.

    The optimizer has to update each parameter by its own gradient. Loss scales are accepted, without effect, for float32. It may
    be any object with param_groups, step and zero_grad, as wrappers of optimizers are; its state is that of its rank then.
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
    model._optimizer = weakref.ref(optimizer)
    state_mod.state.note_optimizer(optimizer)
    patched = vars(optimizer).pop("step", None)  # by a scheduler that was made before, around the step of the class
    ours = _Distributed if isinstance(optimizer, torch.optim.Optimizer) else _Updates
    optimizer.__class__ = type(own.__name__, (ours, own), {})
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


class _Updates:
    """What is different about an object that updates parameters which are spread over ranks."""

    # What transformers and accelerate ask of an optimizer before they leave it as it is.
    _is_accelerate_prepared = True
    step_was_skipped = False
    redefined_params = False

    def step(self, closure=None):
        if closure is not None:
            raise ValueError(
                "step: expected no closure, got one. It would run the model outside of a step function; call that first."
            )
        if _engine.begin_update(self._engine_optimizer):
            super().step()

    def zero_grad(self, *args, **kwargs):
        _engine.refuse_in_body("zero_grad")
        super().zero_grad(*args, **kwargs)

    def clip_master_grads(self, max_norm, norm_type=2.0):
        """Scales the gradients of all ranks down to one global norm; returns what it was. Collective over the pipeline."""
        return model_of(self._parameters()).clip_grad_norm_(max_norm, norm_type)

    clip_grad_norm = clip_master_grads

    def param_name_to_index(self):
        """The place of each parameter among those of state_dict(), by the module's own name."""
        names = {id(parameter): name for name, parameter in model_of(self._parameters()).get_module().named_parameters()}
        return {names[id(parameter)]: index for index, parameter in enumerate(self._parameters())}

    def _param_id_to_index(self):
        return {id(parameter): index for index, parameter in enumerate(self._parameters())}

    def _param_index_to_param_local(self):
        local = {id(parameter) for parameter in model_of(self._parameters()).local_parameters()}
        return {index: parameter for index, parameter in enumerate(self._parameters()) if id(parameter) in local}

    def _parameters(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]


class _Distributed(_Updates):
    """And what is different about the state of a torch.optim.Optimizer."""

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

    orig_state_dict = local_state_dict

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
