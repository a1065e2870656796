"""smp.amp: a loss scale that all ranks agree on."""

import functools

import torch

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.comm import CommGroup, gathered


class GradScaler(torch.amp.GradScaler):
    """torch's, for a model that is spread over ranks. In a step function `model.backward(scaler.scale(loss))`; after it, on all
    ranks, `scaler.unscale_(optimizer)` where gradients are clipped, `scaler.step(optimizer)` and `scaler.update()`. An update is
    left out on all ranks where a gradient of any has overflowed, and made where only a loss has, or one of another model.
    Collective over all ranks: unscale_, or step without it. Made after smp.init, which chooses the device of its scale.
    """

    def __init__(self, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True):
        if isinstance(init_scale, (str, torch.device)):
            raise TypeError(
                f"GradScaler: expected a number as init_scale, got {init_scale!r}. Leave out the device, which "
                "torch.amp.GradScaler takes first: smp.amp.GradScaler()."
            )
        super().__init__(_engine.device_type(), init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        if enabled:
            self._lazy_init_scale_growth_tracker(torch.device(self._device))  # torch's would be in a body, without data

    def __setstate__(self, state):
        vars(self).update(state, _device=_engine.device_type())
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(torch.device(self._device))

    def unscale_(self, optimizer):
        _engine.refuse_in_body("GradScaler.unscale_")
        super().unscale_(optimizer)

    def step(self, optimizer, *args, **kwargs):
        _engine.refuse_in_body("GradScaler.step")
        optimizer._step_supports_amp_scaling = False  # a fused one would look for overflows on its own rank
        optimizer._has_finite_gradients = self.is_enabled()  # as those have for which it makes an update
        try:
            return super().step(optimizer, *args, **kwargs)
        finally:
            optimizer._has_finite_gradients = False

    def update(self, new_scale=None):
        _engine.refuse_in_body("GradScaler.update")
        super().update(new_scale)

    def _unscale_grads_(self, optimizer, inv_scale, found_inf, allow_fp16):
        own = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        overflowed = any(found.item() for found in own.values())
        ranks = gathered("GradScaler.unscale_", (overflowed, self.state_dict()), CommGroup.WORLD)
        states = [state for _, state in ranks]
        for rank, state in enumerate(states):
            if state != states[0]:
                names = [name for name in state if state[name] != states[0].get(name)]
                raise ValueError(
                    f"GradScaler.unscale_: expected the same scaler on all ranks, got {_part(states[0], names)} on rank 0 and "
                    f"{_part(state, names)} on rank {rank}. Make it, load its state and call update(new_scale) on all ranks alike. "
                    "Each rank has divided its gradients by its own scale: call zero_grad before the next step."
                )
        found_inf.fill_(any(overflowed for overflowed, _ in ranks))
        return {found_inf.device: found_inf}


def _part(state, names):
    return ", ".join(f"{name} {state[name]}" for name in names)


_scale = torch.amp.GradScaler.scale


@functools.wraps(_scale)
def _refusing_in_body(scaler, outputs):
    """torch's own would decide on each rank for itself, and makes its scale in the body."""
    if scaler.is_enabled() and not isinstance(scaler, GradScaler) and _engine.is_in_body():
        raise NotImplementedError(
            f"GradScaler.scale: expected smp.amp.GradScaler in a step function, got {type(scaler).__module__}."
            f"{type(scaler).__name__}, whose scale is that of one rank. Write scaler = smp.amp.GradScaler()."
        )
    return _scale(scaler, outputs)


torch.amp.GradScaler.scale = _refusing_in_body
