"""DistributedOptimizer: the optimizer itself, which updates on each rank what lives there."""

from smdistributed.modelparallel import _engine
from smdistributed.modelparallel.torch.model import model_of
from smdistributed.modelparallel.torch.views import OptimizerView


def DistributedOptimizer(optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, **dynamic_loss_args):  # noqa: N802
    """Returns `optimizer`, whose class now derives from its own: schedulers and isinstance see what they saw before.

    The loss scales are accepted, without effect, since parameters are float32.
    """
    del static_loss_scale, dynamic_loss_scale, dynamic_loss_args
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    model = model_of(parameters)
    own = type(optimizer)
    optimizer._engine_optimizer = _engine.add_optimizer(OptimizerView(optimizer), model._engine_model)
    optimizer.__class__ = type(own.__name__, (_Distributed, own), {})
    return optimizer


class _Distributed:
    def step(self, closure=None):
        if closure is not None:
            raise ValueError(
                "step: expected no closure, got one. It would run the model outside of a step function; call that first."
            )
        if _engine.begin_update(self._engine_optimizer):
            super().step()
