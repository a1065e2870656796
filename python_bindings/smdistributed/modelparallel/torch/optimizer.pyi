from typing import Any

from torch.optim import Optimizer

# The given optimizer, of a class derived from its own and from this one.
class _Distributed(Optimizer):
    def step(self, closure: None = None) -> None: ...  # type: ignore[override]
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def local_state_dict(self) -> dict[str, Any]: ...

def DistributedOptimizer(
    optimizer: Optimizer,
    static_loss_scale: float | None = 1.0,
    dynamic_loss_scale: bool = False,
    **dynamic_loss_args: Any,
) -> _Distributed: ...
