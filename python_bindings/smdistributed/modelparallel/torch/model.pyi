from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

class DistributedModel(nn.Module):
    module: nn.Module
    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        trace_memory_usage: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 0,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(self, tensors: Tensor, grad_tensors: None = None) -> None: ...
    @property
    def partitioned(self) -> bool: ...
    @property
    def plan(self) -> str: ...
    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def local_parameters(self) -> Iterator[nn.Parameter]: ...
    def state_dict(self, *, gather_to_rank0: bool = False) -> dict[str, Any]: ...  # type: ignore[override]
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True
    ) -> _IncompatibleKeys: ...
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float: ...
    def get_module(self) -> nn.Module: ...
