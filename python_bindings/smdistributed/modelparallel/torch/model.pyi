from collections.abc import Mapping, Sequence
from typing import Any

from smdistributed.modelparallel.torch.members import Members
from smdistributed.modelparallel.torch.plan import Plan
from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

class DistributedModel(Members, nn.Module):
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
        find_unused_parameters: bool = False,
    ) -> None: ...
    def forward(self, *args: Any, **kwargs: Any) -> Any: ...
    def backward(
        self, tensors: Tensor | Sequence[Tensor], grad_tensors: Tensor | Sequence[Tensor | None] | None = None
    ) -> None: ...
    @property
    def partitioned(self) -> bool: ...
    @property
    def plan(self) -> Plan: ...
    def local_state_dict(self) -> dict[str, Any]: ...
    def state_dict(self, gather_to_rank0: bool = False) -> dict[str, Any]: ...  # type: ignore[override]
    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> _IncompatibleKeys: ...
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float: ...
    def check_replicas(self) -> None: ...
    def get_module(self) -> nn.Module: ...
