"""DistributedOptimizer: the optimizer itself, which updates on each rank what lives there."""

import functools
import weakref

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch import state_mod
from smdistributed.modelparallel.torch.agreement import agreed
from smdistributed.modelparallel.torch.comm import gathered
from smdistributed.modelparallel.torch.model import model_of
from smdistributed.modelparallel.torch.state_dicts import PARTIAL
from smdistributed.modelparallel.torch.views import OptimizerView, fields_of, state_of

_PARTS = "_smp_pp_size"  # of how many a partial dictionary is one
_OF_ELEMENTS = {  # of torch's optimizers: one number for each of the parameter's
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta", "sum", "prev",
    "step_size", "ax",
}  # fmt: skip


class _AsksForUpdates(type):
    def __instancecheck__(cls, optimizer):
        return isinstance(optimizer, _Updates)


class DistributedOptimizer(metaclass=_AsksForUpdates):
    """DistributedOptimizer(optimizer) is `optimizer`, whose class now derives from its own: schedulers and isinstance see what they
    saw before.

    The optimizer has to update each parameter by its own gradient. Loss scales are accepted, without effect, for float32. It may
    be any object with param_groups, step and zero_grad, as wrappers of optimizers are; its state is that of its rank then. One
    that is distributed already is returned as it is: transformers' Trainer passes it again where it trains a second time.
    """

    def __new__(cls, optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, **dynamic_loss_args):
        del dynamic_loss_args
        if isinstance(optimizer, _Updates):
            return optimizer
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
        model._optimizers.append(weakref.ref(optimizer))
        state_mod.state.note_optimizer(optimizer)
        patched = vars(optimizer).pop("step", None)  # by a scheduler that was made before, around the step of the class
        ours = _Distributed if isinstance(optimizer, torch.optim.Optimizer) else _Updates
        optimizer.__class__ = type(own.__name__, (ours, own), {})
        if patched is not None:
            optimizer.step = _as_schedulers_patch(optimizer)
        return optimizer


def only_optimizer(model):
    """The last one made over this model, or None; an error where others update what it does not."""
    last = model._last_optimizer()
    others = [each for each in (made() for made in model._optimizers) if each is not None and each is not last]
    known = _ids(last) if last is not None else set()
    if any(not _ids(each) <= known for each in others):
        raise ValueError(
            f"expected one optimizer of all parameters, got {len(others) + 1} with parts of them. Pass the one that is meant, "
            "optimizer=..., and take the state of others by themselves: smp.save(other.local_state_dict(), ...)."
        )
    return last


def _ids(optimizer):
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


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
    _has_finite_gradients = False  # as a loss scaler knows, whatever the loss
    redefined_params = False

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{type(self).__name__}: expected neither copies nor pickles of a distributed optimizer, whose state is on several ranks. "
            "Take optimizer.state_dict() or smp.save_checkpoint."
        )

    def step(self, closure=None, **kwargs):
        if closure is not None:
            raise ValueError(
                "step: expected no closure, got one. It would run the model outside of a step function; call that first."
            )
        if not _engine.begin_update(self._engine_optimizer, self._has_finite_gradients):
            return None
        return _engine.run_update(self._engine_optimizer, functools.partial(super().step, **kwargs))

    def zero_grad(self, *args, **kwargs):
        _engine.refuse_in_body("zero_grad")
        super().zero_grad(*args, **kwargs)

    def clip_master_grads(self, max_norm, norm_type=2.0):
        """Scales the gradients of all ranks down to one global norm; returns what it was. Collective over the pipeline."""
        return model_of(self._parameters()).clip_grad_norm_(max_norm, norm_type)

    clip_grad_norm = clip_master_grads

    def local_state_dict(self, gather_if_shard=True):
        """What its own state_dict() returns: its state is that of its rank."""
        return super().state_dict()

    def check_state(self, state_dict):
        """Its own load_state_dict() knows what is wrong with it."""

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
        _engine.forget_state_of_others(self._engine_optimizer)
        own = super().state_dict()
        return {**own, "state": self._gathered(own["state"])}

    def local_state_dict(self, gather_if_shard=True):
        """With the state of the parameters on this rank, and `_smp_is_partial`. gather_if_shard is without effect: no state is
        sharded."""
        _engine.forget_state_of_others(self._engine_optimizer)
        return {**super().state_dict(), PARTIAL: True, _PARTS: _engine.pp_size()}

    orig_state_dict = local_state_dict

    def load_state_dict(self, state_dict):
        """Of all parameters, or local_state_dict() on each rank; this rank keeps the state of its own. Collective over all ranks,
        each of which passes one."""
        agreed("load_state_dict", lambda: self.check_state(state_dict))
        kinds = gathered("load_state_dict of an optimizer", bool(state_dict.get(PARTIAL)))
        if len(set(kinds)) > 1:
            raise ValueError(
                "load_state_dict: expected local_state_dict() of an optimizer on every rank or on none, got it on ranks "
                f"{', '.join(str(rank) for rank, is_partial in enumerate(kinds) if is_partial)} alone."
            )
        if kinds[0]:
            state_dict = {**state_dict, "state": self._gathered(state_dict["state"])}
        super().load_state_dict(state_dict)
        _engine.forget_state_of_others(self._engine_optimizer)

    def check_state(self, state_dict):
        """Raises what is wrong with it, before anything is loaded."""
        if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= set(state_dict):
            raise TypeError("expected what an optimizer's state_dict() returns, got something else.")
        if state_dict.get(PARTIAL) and state_dict.get(_PARTS) != _engine.pp_size():
            raise ValueError(
                f"expected the parts of an optimizer from {_engine.pp_size()} partitions, got one of "
                f"{state_dict.get(_PARTS)}. Start as many partitions, or save optimizer.state_dict(), which any number loads."
            )
        given, own = ([len(group["params"]) for group in groups] for groups in (state_dict["param_groups"], self.param_groups))
        if given != own:
            raise ValueError(
                f"expected groups of {own} parameters, got {given}. Load the state of the same optimizer."
            )
        for index, parameter in enumerate(self._parameters()):
            for name, value in state_dict["state"].get(index, {}).items():
                if name in _OF_ELEMENTS and value is not None and value.shape != parameter.shape:
                    raise ValueError(
                        f"expected {name} of parameter {index} to be of its shape {tuple(parameter.shape)}, got "
                        f"{tuple(value.shape)}. Load the state of the same optimizer over the same model."
                    )

    def _gathered(self, state):
        """What the ranks of the pipeline have together. By index, since a dictionary may be one that was read."""
        parameters = dict(enumerate(self._parameters()))
        own = {str(index): fields_of(state[index]) for index in parameters if index in state}
        whole = {int(index): fields for index, fields in _engine.gathered_entries(own).items()}
        updated = {index: state_of(whole[index], each.device) for index, each in parameters.items() if index in whole}
        return {**updated, **{key: value for key, value in state.items() if key not in parameters}}
